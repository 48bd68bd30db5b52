"""GGUF architectures of Qwen3.5 and Qwen3-Next. A block's tensors tell its kind.

For Qwen3.5, llama.cpp tiles the keys where the model repeats each for its group. Value heads are
therefore reordered: the first of every group comes before all the second ones. For Qwen3-Next it
repeats as the model does; q, k, v and z are separate, unlike in files from 2025. Source: llama.cpp,
conversion/qwen.py, src/models/qwen35moe.cpp and src/models/qwen3next.cpp; transformers 5.23,
integrations/gguf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edge.export.checkpoint.gguf.architectures import (
    ATTENTION,
    INERT,
    OPTIONAL,
    QWEN2_MOE,
    QWEN3,
    SIZES,
    TREATED,
    complete_transformer,
    experts_as,
)
from edge.export.checkpoint.gguf.conversion import Metadata, Order, Shapes
from edge.export.checkpoint.gguf.hybrids import has_tensor
from edge.export.checkpoint.gguf.weights import Array

_STATES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.inner_size": "linear_value_head_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_IMPLIED_BY_TENSORS = {"full_attention_interval", "attention.recurrent_layers"}
_DELTANET = {
    "attn_qkv.weight": "in_proj_qkv.weight",
    "attn_gate.weight": "in_proj_z.weight",
    "ssm_alpha.weight": "in_proj_a.weight",
    "ssm_beta.weight": "in_proj_b.weight",
    "ssm_conv1d.weight": "conv1d.weight",
    "ssm_norm.weight": "norm.weight",
    "ssm_out.weight": "out_proj.weight",
    "ssm_a": "A_log",
    "ssm_dt.bias": "dt_bias",
}
_BY_HEAD = (
    "attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"
)  # fmt: skip


def _complete(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    size = config.get("head_dim")
    complete_transformer(shapes, metadata, config)
    drafting = config.get("mtp_num_hidden_layers")
    if isinstance(drafting, int) and isinstance(config.get("num_hidden_layers"), int):
        config["num_hidden_layers"] -= drafting
    inner, heads = config.get("linear_value_head_dim"), config.get("linear_num_value_heads")
    if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
        config["linear_value_head_dim"] = inner // heads
    rotated_dim = metadata.get("rope.dimension_count", size)
    if isinstance(size, int) and size > 0 and isinstance(rotated_dim, int):
        config |= {"head_dim": size, "partial_rotary_factor": rotated_dim / size}
    config["attention_bias"] = any(has_tensor(shapes, "attn_q.bias", config))
    attends = has_tensor(shapes, "attn_q.weight", config)
    config["layer_types"] = [
        "full_attention" if attending else "linear_attention" for attending in attends
    ]


def _order(tensor: str, config: Mapping[str, Any]) -> Order | None:
    """Return a function that restores the order of value heads by groups, or None if unchanged."""
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    sizes = [size for size in map(config.get, names) if isinstance(size, int) and size > 0]
    if len(sizes) < 3 or sizes[0] == sizes[1]:
        return None
    groups, heads, size = sizes

    def in_groups(rows: Array) -> Array:
        if heads % groups or rows.shape[0] % heads:
            return rows  # the config or the shape is refused elsewhere
        tiled = rows.reshape(heads // groups, groups, -1, *rows.shape[1:])
        return tiled.swapaxes(0, 1).reshape(rows.shape)

    def after_keys(rows: Array) -> Array:
        queries_and_keys, values = np.split(rows, [2 * groups * size])
        return np.concatenate([queries_and_keys, in_groups(values)])

    if tensor in _BY_HEAD:
        return in_groups
    if tensor in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return after_keys
    return (lambda matrix: in_groups(matrix.T).T) if tensor == "ssm_out.weight" else None


QWEN35 = replace(
    QWEN3,
    name="qwen35",
    required={**SIZES, **ATTENTION, **_STATES, "attention.key_length": "head_dim"},
    optional={**OPTIONAL, "nextn_predict_layers": "mtp_num_hidden_layers"},
    inert=INERT | TREATED | _IMPLIED_BY_TENSORS | {"rope.dimension_sections"},
    fixed={"model_type": "qwen3_5_text", "hidden_act": "silu"},
    block={
        **QWEN3.block,
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        **{ours: f"linear_attn.{theirs}" for ours, theirs in _DELTANET.items()},
    },
    shifted=True,
    order=_order,
    sizes=("attention.value_length",),
    complete=_complete,
)
_WIDTH = "feed_forward_length"  # width of MLPs, which these models lack
# llama.cpp always normalizes gates to sum to one, whatever the config said
QWEN35_MOE = replace(
    QWEN35,
    name="qwen35moe",
    required={
        **{key: field for key, field in QWEN35.required.items() if key != _WIDTH},
        **experts_as("num_experts"),
    },
    optional={
        **QWEN35.optional, **QWEN2_MOE.optional,
        "expert_weights_norm": "norm_topk_prob", _WIDTH: QWEN35.required[_WIDTH],
    },
    fixed={"model_type": "qwen3_5_moe_text", "hidden_act": "silu", "norm_topk_prob": True},
    block={
        **QWEN2_MOE.block,
        **QWEN35.block,
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    },
)  # fmt: skip
QWEN3_NEXT = replace(
    QWEN35_MOE,
    name="qwen3next",
    inert=INERT | TREATED | _IMPLIED_BY_TENSORS,
    fixed={**QWEN35_MOE.fixed, "model_type": "qwen3_next"},
    block={
        **{
            ours: theirs
            for ours, theirs in QWEN35_MOE.block.items()
            if ours not in ("ssm_alpha.weight", "ssm_beta.weight")
        },
        "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
        "ssm_in.weight": "linear_attn.in_proj_qkvz.weight",
    },
    order=lambda tensor, config: None,
)

DELTANETS = (QWEN35, QWEN35_MOE, QWEN3_NEXT)
