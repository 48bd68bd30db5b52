"""GGUF's architectures of one kind of mixer: Llama and its kin, Mamba and Mamba-2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.export.checkpoint.gguf.conversion import GgufArchitecture, Metadata, Shapes

# -- Transformers ------------------------------------------------------------------------------

SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
}
ATTENTION = {
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "feed_forward_length": "intermediate_size",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
INERT = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
TREATED = frozenset(
    {
        "attention.value_length", "rope.dimension_count", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
TRANSFORMER_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{
        f"attn_{theirs}.{kind}": f"self_attn.{ours}_proj.{kind}"
        for theirs, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
        for kind in ("weight", "bias")
    },
    **{
        f"ffn_{which}.{kind}": f"mlp.{which}_proj.{kind}"
        for which in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
ROPE_FACTORS = "rope_freqs.weight"


def complete_transformer(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    config.setdefault("num_key_value_heads", heads)
    if (
        isinstance(heads, int)
        and isinstance(width, int)
        and config.get("head_dim") == width // max(1, heads)
    ):
        del config["head_dim"]  # not every family may say so
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none"):
        said = {field: metadata.get(f"rope.scaling.{key}") for key, field in _SCALING.items()}
        config["rope_scaling"] = {"rope_type": kind} | {k: v for k, v in said.items() if v}


def _complete_llama(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes


LLAMA = GgufArchitecture(
    name="llama",
    required={**SIZES, **ATTENTION},
    optional=OPTIONAL,
    inert=INERT | TREATED,
    fixed={"model_type": "llama", "hidden_act": "silu"},
    ends=ENDS,
    block=TRANSFORMER_BLOCK,
    layer="model.layers",
    rotated=True,
    complete=_complete_llama,
)


def _like_llama(name: str, **changes: Any) -> GgufArchitecture:
    """Llama's keys and tensors, with what is another's own."""
    fixed = {"model_type": name, "hidden_act": "silu"}
    return replace(LLAMA, name=name, fixed=fixed, **{"complete": complete_transformer, **changes})


# q and k of these are as they were: llama.cpp rotates halves
QWEN2 = _like_llama("qwen2", rotated=False)
QWEN3 = _like_llama(
    "qwen3",
    rotated=False,
    block={
        **TRANSFORMER_BLOCK,
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
    },
)
# every fourth block has no RoPE, which is what its config says where it says nothing
SMOLLM3 = _like_llama("smollm3", complete=_complete_llama)
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE = _like_llama("granite", optional={**OPTIONAL, **FACTORS}, complete=_complete_llama)

# -- Mamba -------------------------------------------------------------------------------------

_MAMBA = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.inner_size": "intermediate_size",
    "ssm.state_size": "state_size",
}
_MAMBA_INERT = frozenset(
    {"context_length", "feed_forward_length", "attention.head_count", "vocab_size"}
)
_MAMBA_ENDS = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_MAMBA_BLOCK = {
    "attn_norm.weight": "norm.weight",
    "ssm_in.weight": "mixer.in_proj.weight",
    "ssm_in.bias": "mixer.in_proj.bias",
    "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_out.weight": "mixer.out_proj.weight",
    "ssm_out.bias": "mixer.out_proj.bias",
}


def _complete_mamba(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    inner, width = config.get("intermediate_size"), config.get("hidden_size")
    if isinstance(inner, int) and isinstance(width, int) and width > 0:
        config["expand"] = inner / width
    config["use_conv_bias"] = "blk.0.ssm_conv1d.bias" in shapes
    config["use_bias"] = "blk.0.ssm_in.bias" in shapes
    if metadata.get("ssm.dt_b_c_rms"):
        config["model_type"] = "falcon_mamba"


def _complete_mamba2(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete_mamba(shapes, metadata, config)
    inner, heads = config.get("intermediate_size"), config.get("num_heads")
    if isinstance(inner, int) and isinstance(heads, int) and heads > 0:
        config["head_dim"] = inner // heads


MAMBA = GgufArchitecture(
    name="mamba",
    required={**_MAMBA, "ssm.time_step_rank": "time_step_rank"},
    optional={},
    inert=_MAMBA_INERT | {"ssm.dt_b_c_rms"},
    fixed={"model_type": "mamba", "hidden_act": "silu"},
    ends=_MAMBA_ENDS,
    block={
        **_MAMBA_BLOCK,
        "ssm_x.weight": "mixer.x_proj.weight",
        "ssm_dt.weight": "mixer.dt_proj.weight",
        "ssm_dt.bias": "mixer.dt_proj.bias",
    },
    layer="backbone.layers",
    complete=_complete_mamba,
)
MAMBA2 = GgufArchitecture(
    name="mamba2",
    required={**_MAMBA, "ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"},
    optional={},
    inert=_MAMBA_INERT,
    fixed={"model_type": "mamba2", "hidden_act": "silu"},
    ends=_MAMBA_ENDS,
    block={
        **_MAMBA_BLOCK,
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_norm.weight": "mixer.norm.weight",
    },
    layer="backbone.layers",
    complete=_complete_mamba2,
)

PLAIN = (LLAMA, MAMBA, MAMBA2, QWEN2, QWEN3, SMOLLM3, GRANITE)
