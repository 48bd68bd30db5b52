"""GGUF architectures with one kind of mixer: Llama and its relatives, Mamba and Mamba-2."""

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
# a router and stacks of all experts' matrices, which map to the first expert's name in a checkpoint
ROUTED = {
    "ffn_gate_inp.weight": "gate.weight",
    **{f"ffn_{which}_exps.weight": f"experts.0.{which}_proj.weight"
       for which in ("gate", "up", "down")},
}  # fmt: skip
WORTH = {"expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor"}
_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
ROPE_FACTORS = "rope_freqs.weight"
# LongRoPE's tensors → fields of a config
LONGROPE_FACTORS = {
    f"rope_factors_{which}.weight": f"{which}_factor" for which in ("long", "short")
}


def complete_transformer(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    config.setdefault("num_key_value_heads", heads)
    if (
        isinstance(heads, int)
        and isinstance(width, int)
        and config.get("head_dim") == width // max(1, heads)
    ):
        del config["head_dim"]  # not every family accepts the field
    kind = metadata.get("rope.scaling.type")
    if kind not in (None, "none"):
        scaling = {field: metadata.get(f"rope.scaling.{key}") for key, field in _SCALING.items()}
        config["rope_scaling"] = {"rope_type": kind} | {k: v for k, v in scaling.items() if v}


def experts_as(count: str) -> dict[str, str]:
    """Return the keys of the number of experts, as a family names the field, and of those used."""
    return {"expert_count": count, "expert_used_count": "num_experts_per_tok"}


def _complete_llama(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    if metadata.get("expert_count", 0) not in (0, 1):  # Mixtral's files name Llama
        config["model_type"] = "mixtral"
        return
    for field in experts_as("num_local_experts").values():
        config.pop(field, None)
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_up.bias" in shapes


_MIXTRAL = {
    f"experts.0.{which}_proj.weight": f"experts.0.w{number}.weight"
    for which, number in (("gate", 1), ("down", 2), ("up", 3))
}
LLAMA = GgufArchitecture(
    name="llama",
    required={**SIZES, **ATTENTION},
    optional={**OPTIONAL, **experts_as("num_local_experts")},
    inert=INERT | TREATED,
    fixed={"model_type": "llama", "hidden_act": "silu"},
    ends=ENDS,
    block=TRANSFORMER_BLOCK
    | {ours: f"block_sparse_moe.{_MIXTRAL.get(theirs, theirs)}" for ours, theirs in ROUTED.items()},
    layer="model.layers",
    rotated=True,
    complete=_complete_llama,
)


def like_llama(name: str, **changes: Any) -> GgufArchitecture:
    """Return Llama's keys and tensors, without experts, with the `changes` of another model."""
    defaults: dict[str, Any] = {
        "optional": OPTIONAL, "block": TRANSFORMER_BLOCK, "complete": complete_transformer,
        "fixed": {"model_type": name, "hidden_act": "silu"},
    }  # fmt: skip
    return replace(LLAMA, name=name, **{**defaults, **changes})


QK_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
# q and k keep their order here: llama.cpp rotates halves
QWEN2 = like_llama("qwen2", rotated=False)
QWEN3 = like_llama(
    "qwen3",
    rotated=False,
    block=TRANSFORMER_BLOCK | QK_NORMS,
)
# llama.cpp always normalizes gates to sum to one, whatever the config said
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3moe",
    optional={
        **OPTIONAL, **experts_as("num_experts"), **WORTH,
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    fixed={"model_type": "qwen3_moe", "hidden_act": "silu", "norm_topk_prob": True},
    block={**QWEN3.block, **{ours: f"mlp.{theirs}" for ours, theirs in ROUTED.items()}},
)  # fmt: skip
_SHARED = {f"ffn_{which}_shexp.weight": f"mlp.shared_expert.{which}_proj.weight"
           for which in ("gate", "up", "down")}  # fmt: skip
QWEN2_MOE = replace(
    QWEN2,
    name="qwen2moe",
    optional={
        **OPTIONAL, **experts_as("num_experts"),
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    fixed={"model_type": "qwen2_moe", "hidden_act": "silu"},
    block={
        **TRANSFORMER_BLOCK, **{ours: f"mlp.{theirs}" for ours, theirs in ROUTED.items()},
        **_SHARED, "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    },
)  # fmt: skip
# MLPs without a gate; q and k are permuted as in Llama
ARCEE = like_llama(
    "arcee", complete=_complete_llama, fixed={"model_type": "arcee", "hidden_act": "relu2"}
)
# every fourth block has no RoPE, which is the default of its config
SMOLLM3 = like_llama("smollm3", complete=_complete_llama)
NORMS_BEHIND = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def _head_size(config: dict[str, Any]) -> int:
    """Return the width per head, or 0 for invalid values, for which the config is refused."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        return width // heads
    return 0


# llama.cpp recognizes the 27B models by their blocks; their scores have a different divisor
_LARGEST_BLOCKS = {"gemma2": 46, "gemma3_text": 62}


def _complete_gemma(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    size = metadata.get("attention.key_length", 256)
    config["head_dim"] = size
    if config["model_type"] in _LARGEST_BLOCKS:
        largest = config.get("num_hidden_layers") == _LARGEST_BLOCKS[config["model_type"]]
        config["query_pre_attn_scalar"] = (largest and _head_size(config)) or size


GEMMA = like_llama(
    "gemma",
    rotated=False,
    shifted=True,
    fixed={"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    complete=_complete_gemma,
)
_BOTH_NORMS = {
    **TRANSFORMER_BLOCK, **NORMS_BEHIND, "ffn_norm.weight": "pre_feedforward_layernorm.weight"
}  # fmt: skip
# every second block attends to all tokens
GEMMA2 = replace(
    GEMMA,
    name="gemma2",
    optional={
        **OPTIONAL, "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    fixed={"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"},
    block=_BOTH_NORMS,
)  # fmt: skip
# every sixth block attends to all tokens, and the others have a RoPE base of 10,000
GEMMA3 = replace(
    GEMMA,
    name="gemma3",
    optional={**OPTIONAL, "attention.sliding_window": "sliding_window"},
    fixed={"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
    block=_BOTH_NORMS | QK_NORMS,
)


def _complete_phi3(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    rotated_dim, size = metadata.get("rope.dimension_count"), _head_size(config)
    if isinstance(rotated_dim, int) and size:
        config["partial_rotary_factor"] = rotated_dim / size
    if not config.get("sliding_window"):  # 0 is none
        config["sliding_window"] = None


PHI3 = like_llama(
    "phi3",
    rotated=False,
    optional={
        **OPTIONAL, "attention.sliding_window": "sliding_window",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
    },
    inert=INERT | TREATED | {"rope.scaling.attn_factor"},
    sizes=("attention.value_length",),
    block={
        "attn_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "attn_qkv.weight": "self_attn.qkv_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "ffn_up.weight": "mlp.gate_up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    },
    complete=_complete_phi3,
)  # fmt: skip
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GRANITE = like_llama("granite", optional={**OPTIONAL, **FACTORS}, complete=_complete_llama)


def _complete_granite_moe(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    complete_transformer(shapes, metadata, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if config.get("shared_intermediate_size"):
        config["model_type"] = "granitemoeshared"


GRANITE_EXPERTS = {
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_gate_exps.weight": "block_sparse_moe.input_linear.weight",
    "ffn_up_exps.weight": "block_sparse_moe.input_linear.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
    "ffn_gate_shexp.weight": "shared_mlp.input_linear.weight",
    "ffn_up_shexp.weight": "shared_mlp.input_linear.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
}
GRANITE_MOE = like_llama(
    "granitemoe",
    optional={
        **OPTIONAL, **FACTORS, **experts_as("num_local_experts"),
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    block={
        **{ours: theirs for ours, theirs in TRANSFORMER_BLOCK.items() if "ffn_" not in ours},
        "ffn_norm.weight": TRANSFORMER_BLOCK["ffn_norm.weight"],
        **GRANITE_EXPERTS,
    },
    complete=_complete_granite_moe,
)  # fmt: skip

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

PLAIN = (
    LLAMA,
    MAMBA,
    MAMBA2,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    ARCEE,
    SMOLLM3,
    GRANITE,
    GRANITE_MOE,
)
