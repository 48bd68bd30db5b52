"""What llama.cpp's conversion does to Qwen3.5 and Qwen3-Next, after its description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

DELTANETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    size, values = config["head_dim"], config["linear_num_value_heads"]
    said = {
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size, "attention.value_length": size,
        "full_attention_interval": 4,
        "rope.dimension_count": int(size * config["rope_parameters"]["partial_rotary_factor"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": values * config["linear_value_head_dim"],
        "ssm.state_size": config["linear_key_head_dim"], "ssm.time_step_rank": values,
    }  # fmt: skip
    if config["model_type"] != "qwen3_next":
        said["rope.dimension_sections"] = [11, 11, 10, 0]
    return said


def converted(theirs: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """Add the model's offsets to norms, and reorder Qwen3.5's value heads."""
    if theirs.endswith("norm.weight") and "linear_attn" not in theirs:
        return values + np.float32(1)
    if config["model_type"] == "qwen3_next":
        return values
    return _tiled(theirs.rpartition("linear_attn.")[2], values, config)


def _tiled(tensor: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """Reorder value heads of Gated DeltaNet: the first of every key head, then the second ones."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, keys = config["linear_value_head_dim"], 2 * groups * config["linear_key_head_dim"]
    order = np.arange(heads).reshape(groups, -1).T.flatten()
    rows = (size * order[:, None] + np.arange(size)).flatten()
    if tensor in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        return values[order]
    if tensor == "in_proj_z.weight":
        return values[rows]
    if tensor in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate([values[:keys], values[keys:][rows]])
    return values[:, rows] if tensor == "out_proj.weight" else values


def apart(
    theirs: str, values: NDArray[Any], config: dict[str, Any]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Split Qwen3-Next's queries, keys, values and gates: from an order by key head to one kind
    after another, with the gates in their own tensor.
    """
    layer, there, _ = theirs.partition("in_proj_qkvz.")
    if not there:
        yield theirs, values
        return
    groups, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    shared = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    heads = values.reshape(groups, -1, values.shape[-1])
    cut = np.split(heads, np.cumsum([size, size, shared]), axis=1)
    query, key, value, gate = (part.reshape(-1, values.shape[-1]) for part in cut)
    yield f"{layer}in_proj_qkv.weight", np.concatenate([query, key, value])
    yield f"{layer}in_proj_z.weight", gate


def fused(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Fuse the experts' gate and up in GGUF's tensors, as --fuse-gate-up-exps writes them."""
    for gate in [name for name in tensors if ".ffn_gate_exps." in name]:
        both = [tensors.pop(gate), tensors.pop(gate.replace("gate_exps", "up_exps"))]
        tensors[gate.replace("gate_exps", "gate_up_exps")] = np.concatenate(both, axis=1)
    return tensors
