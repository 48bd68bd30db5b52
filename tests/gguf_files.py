"""Writes GGUF files from tiny transformers checkpoints, with the `gguf` package's own writer.

What llama.cpp's conversion does to values (convert_hf_to_gguf.py) is written here from its
description, and names come from the package's table: neither is taken from what is tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "falcon_mamba": gguf.MODEL_ARCH.MAMBA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
}
TRANSFORMERS = ("llama", "qwen2", "qwen3", "smollm3", "granite")
ROTATED = ("llama", "smollm3", "granite")
_FACTORS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
# byte-level BPE as tests.checkpoints trains it
TEXT: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}


def write_gguf(checkpoint: Path, out: Path, *, kind: Kind | None = None, **changes: Any) -> Path:
    """The GGUF of a transformers checkpoint; `kind` of its matrices. `changes` to the metadata, by
    key with `__` for a dot; ... removes one.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(
        ARCHITECTURES[config["model_type"]], config["num_hidden_layers"]
    )
    name = config["model_type"].removeprefix("falcon_")
    writer = GGUFWriter(out, name)
    for key, value in (_metadata(name, config) | _tokenizer(checkpoint, config)).items():
        changed = changes.pop(key.replace(".", "__"), value)
        if changed is not ...:
            _add(writer, key, changed)
    for key, value in changes.items():
        _add(writer, key.replace("__", "."), value)
    for theirs, values in load_file(checkpoint / "model.safetensors").items():
        ours = names.get_name(theirs.replace(".dt_bias", ".dt_proj.bias"), (".weight", ".bias"))
        assert ours is not None, theirs
        _add_tensor(writer, ours, _converted(ours, theirs, values, config), kind)
    scaling = config.get("rope_parameters") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3(config, scaling))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, values: NDArray[Any], kind: Kind | None) -> None:
    matrix = values.ndim == 2 and not name.rpartition(".")[0].endswith(("ssm_conv1d", "ssm_norm"))
    if kind is None or not matrix or name.endswith("ssm_a"):
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"]
    found: dict[str, Any] = {
        "general.license": "apache-2.0",
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.embedding_length": width,
    }
    if name in TRANSFORMERS:
        heads, rope = config["num_attention_heads"], config["rope_parameters"]
        size = config.get("head_dim") or width // heads
        said = {
            "context_length": config["max_position_embeddings"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": heads,
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.key_length": size,
            "attention.value_length": size,
            "rope.freq_base": float(rope["rope_theta"]),
            "rope.dimension_count": size,
            "vocab_size": config["vocab_size"],
        }
        said |= {key: config[field] for field, key in _FACTORS.items() if field in config}
        return found | {f"{name}.{key}": value for key, value in said.items()}
    inner = int(config["expand"] * width)
    found |= {
        f"{name}.context_length": 1 << 20,
        f"{name}.feed_forward_length": 0,
        f"{name}.attention.head_count": 0,
        f"{name}.attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        f"{name}.ssm.conv_kernel": config["conv_kernel"],
        f"{name}.ssm.inner_size": inner,
        f"{name}.ssm.state_size": config["state_size"],
        f"{name}.ssm.time_step_rank": config.get("time_step_rank"),
    }
    if name == "mamba":
        return found | {"mamba.ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba"}
    return found | {
        "mamba2.ssm.time_step_rank": inner // config["head_dim"],
        "mamba2.ssm.group_count": config["n_groups"],
    }


def _tokenizer(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary, filled up to the embedding as a conversion does."""
    made = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = {index: text for text, index in made["model"]["vocab"].items()}
    special = {token["id"]: token["special"] for token in made["added_tokens"]}
    tokens, kinds = [], []
    for index in range(config["vocab_size"]):
        tokens.append(vocabulary.get(index, f"[PAD{index}]"))
        control = gguf.TokenType.CONTROL if special.get(index) else gguf.TokenType.USER_DEFINED
        if index not in vocabulary:
            kinds.append(gguf.TokenType.UNUSED)
        else:
            kinds.append(control if index in special else gguf.TokenType.NORMAL)
    merges = [" ".join(merge) for merge in made["model"]["merges"]]
    found = {"tokens": tokens, "token_type": [int(kind) for kind in kinds], "merges": merges}
    return TEXT | {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _converted(
    ours: str, theirs: str, values: NDArray[Any], config: dict[str, Any]
) -> NDArray[Any]:
    if config["model_type"] in TRANSFORMERS:
        for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f".{which}_proj." in theirs and config["model_type"] in ROTATED:
                # halves of a head become neighbours
                halves = values.reshape(config[heads], 2, -1, *values.shape[1:])
                return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        return values
    if theirs.endswith("A_log"):
        values = -np.exp(values)
    if theirs.endswith("conv1d.weight"):
        return values.squeeze()
    if config["model_type"] == "mamba2":
        if ours.endswith(("ssm_a", "ssm_d")):
            return values.reshape(-1, 1)
        if ".ssm_norm." in ours:
            return values.reshape(config["n_groups"], -1)
    return values


def _llama3(config: dict[str, Any], scaling: dict[str, Any]) -> NDArray[np.float32]:
    """llama.cpp, generate_extra_tensors: what each frequency is divided by."""
    size = config["head_dim"]
    factors = []
    for pair in range(0, size, 2):
        wave = 2 * np.pi * scaling["rope_theta"] ** (pair / size)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = scaling["original_max_position_embeddings"] / wave
        if share > high:
            factors.append(1.0)
        elif share < low:
            factors.append(scaling["factor"])
        else:
            smooth = (share - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
