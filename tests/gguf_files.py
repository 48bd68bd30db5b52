"""Write GGUF files from tiny transformers checkpoints, with the `gguf` package's own writer.

The changes of llama.cpp's conversion (convert_hf_to_gguf.py) to values are implemented here from
its description, and names come from the package's table: neither comes from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests import gguf_deltanet
from tests.gguf_deltanet import DELTANETS

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "falcon_mamba": gguf.MODEL_ARCH.MAMBA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "arcee": gguf.MODEL_ARCH.ARCEE,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
}
TRANSFORMERS = (
    "llama", "arcee", "qwen2", "qwen3", "smollm3", "granite", "qwen2moe", "qwen3moe", "granitemoe",
    "gemma", "gemma2", "gemma3", "olmo2", "phi3",
)  # fmt: skip
ROTATED = (
    "llama", "arcee", "smollm3", "granite", "granitemoehybrid", "nemotron_h", "mixtral",
    "granitemoe", "granitemoeshared",
)  # fmt: skip
HYBRIDS = (
    "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "lfm2", "lfm2_moe", *DELTANETS
)  # fmt: skip
_EXPERTS = {
    "num_experts": "expert_count", "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm", "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
    "moe_latent_size": "moe_latent_size", "num_dense_layers": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
}  # fmt: skip
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FACTORS = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
}  # fmt: skip
_YARN = {
    "type": "rope_type", "factor": "factor", "yarn_beta_fast": "beta_fast",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
}  # fmt: skip
# byte-level BPE as tests.checkpoints trains it
TEXT: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}


def write_gguf(
    checkpoint: Path,
    out: Path,
    *,
    kind: Kind | None = None,
    more: Iterable[str] = (),
    fused: bool = False,
    legacy: bool = False,
    **changes: Any,
) -> Path:
    """Write the GGUF of a transformers checkpoint. `kind`: type of its matrices; `more`: unused
    tensors. `fused`: experts' gate and up share a tensor. `legacy`: so do q, k, v and z of
    Qwen3-Next. `changes` edits the metadata, by key with `__` for a dot; ... removes one.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    if config.get("n_routed_experts"):
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    kinds = config.get("layers_block_type", [])
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers", len(kinds)))
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = GGUFWriter(out, name)
    for key, value in (_metadata(name, config) | _tokenizer(checkpoint, config)).items():
        changed = changes.pop(key.replace(".", "__"), value)
        if changed is not ...:
            _add(writer, key, changed)
    for key, value in changes.items():
        _add(writer, key.replace("__", "."), value)
    tensors = {}
    for theirs, values in _split(load_file(checkpoint / "model.safetensors"), config, legacy):
        said = theirs.replace(".dt_bias", ".dt_proj.bias").replace(
            "expert_bias", "expert_bias.bias"
        )
        said = said.replace("e_score_correction_bias", "e_score_correction.bias")
        ours = names.get_name(said, (".weight", ".bias"))
        assert ours is not None, theirs
        tensors[ours] = _converted(ours, theirs, values, config)
    for ours, values in (gguf_deltanet.fused(tensors) if fused else tensors).items():
        _add_tensor(writer, ours, values, kind)
    for name in more:
        writer.add_tensor(name, np.zeros(3, np.float32))
    scaling = config.get("rope_parameters") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3(config, scaling))
    for which in ("long", "short"):
        if factors := scaling.get(f"{which}_factor"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(factors, np.float32))
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
    elif value is not None:
        writer.add_array(key, value)


def _add_tensor(writer: GGUFWriter, name: str, values: NDArray[Any], kind: Kind | None) -> None:
    matrix = values.ndim > 1 and not name.rpartition(".")[0].endswith(("ssm_conv1d", "ssm_norm"))
    if kind is None or not matrix or name.endswith("ssm_a"):
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def _metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    width = config["hidden_size"]
    if config["model_type"] in HYBRIDS:
        return _hybrid_metadata(name, config)
    found: dict[str, Any] = {
        "general.license": "apache-2.0",
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.embedding_length": width,
    }
    if name in TRANSFORMERS:
        heads, rope = config["num_attention_heads"], config["rope_parameters"]
        rope = rope.get("full_attention", rope)
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
        capped = ("attn_logit_softcapping", "final_logit_softcapping")
        said |= {key: config[key] for key in capped if config.get(key)}
        if name in ("gemma2", "gemma3", "phi3"):
            said["attention.sliding_window"] = config["sliding_window"] or 0
        if config["model_type"] == "olmo3":
            local = config["rope_parameters"].get("sliding_attention", rope)
            said |= {
                "attention.sliding_window": config["sliding_window"],
                "attention.sliding_window_pattern": [
                    kind == "sliding_attention" for kind in config["layer_types"]
                ],
                "rope.freq_base_swa": float(local["rope_theta"]),
            }
        if rope["rope_type"] == "longrope":
            original, stretched = (
                config[f"{when}max_position_embeddings"] for when in ("original_", "")
            )
            said |= {
                "rope.dimension_count": int(size * rope["partial_rotary_factor"]),
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": float(
                    np.sqrt(1 + np.log(stretched / original) / np.log(original))
                ),
            }
        if rope["rope_type"] == "linear":
            said |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
        if rope["rope_type"] == "yarn":
            said |= {
                f"rope.scaling.{key}": rope[field] for key, field in _YARN.items() if field in rope
            }
        return found | {
            f"{name}.{key}": value for key, value in (said | _of_experts(config)).items()
        }
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


def _hybrid_metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return metadata as the classes of llama.cpp's conversion set them, their base classes
    included.
    """
    kind, width = config["model_type"], config["hidden_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    types = config.get("layer_types") or config.get("layers_block_type")
    if kind == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        types = ["full_attention" if n % period == offset else "mamba"
                 for n in range(config["num_hidden_layers"])]  # fmt: skip
    if types is not None:
        kv_heads = [kv_heads if type_ == "full_attention" else 0 for type_ in types]
    inner = int(config.get("mamba_expand", 2) * width)
    said: dict[str, Any] = {
        "block_count": config.get("num_hidden_layers") or len(types or ()),
        "context_length": config["max_position_embeddings"],
        "embedding_length": width,
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "ssm.conv_kernel": config.get("mamba_d_conv"),
        "ssm.inner_size": config.get("mamba_d_ssm") or inner,
        "ssm.state_size": config.get("mamba_d_state"),
        "ssm.time_step_rank": config.get("mamba_n_heads"),
        "ssm.group_count": config.get("mamba_n_groups"),
        "rope.freq_base": (config.get("rope_parameters") or {}).get("rope_theta"),
        "vocab_size": config["vocab_size"],
    }
    size = config.get("head_dim")
    if kind in ("falcon_h1", "nemotron_h"):
        said |= {"attention.key_length": size, "attention.value_length": size}
    if kind == "granitemoehybrid":
        turned = config.get("position_embedding_type") == "rope"
        said |= {key: config[field] for field, key in _FACTORS.items()} | {
            "rope.dimension_count": width // heads,
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": turned,
        }  # fmt: skip
        if not turned:
            said["context_length"] = 1 << 20
    if kind == "jamba":
        said |= {"ssm.time_step_rank": config["mamba_dt_rank"], "rope.freq_base": None}
    if kind == "nemotron_h":
        said |= {
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "feed_forward_length": [config["intermediate_size"] * (t == "mlp") for t in types],
            "rope.dimension_count": width // heads, "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config["conv_kernel"], "ssm.group_count": config["n_groups"],
            "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
            "ssm.state_size": config["ssm_state_size"],
            "ssm.time_step_rank": config["mamba_num_heads"], "context_length": 1 << 20,
        }  # fmt: skip
    if kind in DELTANETS:
        said |= gguf_deltanet.metadata(config)
    if kind.startswith("lfm2"):
        said = {key: value for key, value in said.items() if not key.startswith("ssm.")} | {
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "shortconv.l_cache": config["conv_L_cache"],
            "feed_forward_length": _adjusted(config)
            if kind == "lfm2"
            else said["feed_forward_length"],
        }
    return {f"{name}.{key}": value for key, value in (said | _of_experts(config)).items()}


def _of_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of models with experts, and the dense ones of families that may have both."""
    kind = config["model_type"]
    if kind == "nemotron_h" and not config.get("n_routed_experts"):
        return {}
    said = {key: config[field] for field, key in _EXPERTS.items() if config.get(field) is not None}
    if "expert_count" in said and kind in ("lfm2_moe", "nemotron_h"):
        said["expert_gating_func"] = 2  # sigmoid
    return said


def _adjusted(config: dict[str, Any]) -> int:
    """Return two thirds of the stated width, rounded up, as LFM2's class does."""
    multiple = config["block_multiple_of"]
    return -(-int(2 * config["intermediate_size"] / 3) // multiple) * multiple


def _split(
    tensors: dict[str, NDArray[Any]], config: dict[str, Any], legacy: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Split Granite's fused gate and up, and Qwen3-Next's projections unless the file is `legacy`;
    stack experts' matrices under names that the package's table knows.
    """
    stacks: dict[str, dict[int, NDArray[Any]]] = {}
    mixed = any(".block_sparse_moe." in name for name in tensors)
    for name, values in tensors.items():
        prefix, shared, which = name.partition(".shared_mlp.")
        if name.endswith(".block_sparse_moe.input_linear.weight"):
            layer = name.partition(".block_sparse_moe.")[0]
            for part, each in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"{layer}.mlp.experts.{part}_proj.weight", np.ascontiguousarray(each)
        elif ".experts." in name:
            block, number, matrix = name.split(".")[2], *name.split(".experts.")[1].split(".")[:2]
            merged = f"model.layers.{block}.mlp.experts.{_MATRICES.get(matrix, matrix)}.weight"
            stacks.setdefault(merged, {})[int(number)] = values
        elif shared and mixed and which == "output_linear.weight":
            yield name, values
        elif which == "input_linear.weight":
            gate, up = np.split(values, 2)
            mlp = "mlp.shared_expert" if mixed else "mlp"
            yield f"{prefix}.{mlp}.gate_proj.weight", gate
            yield f"{prefix}.{mlp}.up_proj.weight", up
        elif shared:
            yield f"{prefix}.mlp.down_proj.weight", values
        elif legacy:
            yield name, values
        else:
            yield from gguf_deltanet.apart(name, values, config)
    for name, found in stacks.items():
        yield name, np.stack([found[number] for number in range(len(found))])


def _tokenizer(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the vocabulary, filled up to the embedding as a conversion does."""
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
    kind = config["model_type"]
    if kind == "falcon_h1":
        values = _multiplied(theirs, values, config)
    for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        if f".{which}_proj." in theirs and kind in ROTATED:
            # halves of a head are interleaved
            halves = values.reshape(config[heads], 2, -1, *values.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    if kind.startswith("gemma") and theirs.endswith("norm.weight"):
        return values + np.float32(1)
    if kind in DELTANETS:
        values = gguf_deltanet.converted(theirs, values, config)
    if theirs.endswith("A_log"):
        values = -np.exp(values)
    if theirs.endswith(("conv1d.weight", "conv.conv.weight", "shared_expert_gate.weight")):
        return values.squeeze()
    groups = config.get("n_groups", config.get("mamba_n_groups"))
    if groups is not None:  # Mamba-2
        if ours.endswith(("ssm_a", "ssm_d")):
            return values.reshape(-1, 1)
        if ".ssm_norm." in ours:
            return values.reshape(groups, -1)
    return values


def _multiplied(theirs: str, values: NDArray[Any], config: dict[str, Any]) -> NDArray[Any]:
    """Fold Falcon-H1's factors into the weights that they multiply."""
    scan, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    widths = (scan, scan, states, states, config["mamba_n_heads"])
    incoming = config["attention_in_multiplier"]
    factors: dict[str, Any] = {
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1], "q_proj": incoming, "v_proj": incoming,
        "k_proj": incoming * config["key_multiplier"], "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
        "in_proj": config["ssm_in_multiplier"]
        * np.repeat(config["ssm_multipliers"], widths)[:, None],
    }  # fmt: skip
    parts = theirs.split(".")
    return values * np.float32(factors.get(parts[-2], 1.0))


def _llama3(config: dict[str, Any], scaling: dict[str, Any]) -> NDArray[np.float32]:
    """Return the divisor of each frequency (llama.cpp, generate_extra_tensors)."""
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
