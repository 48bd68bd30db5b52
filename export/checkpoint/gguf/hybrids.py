"""GGUF architectures of hybrids. A block's tensors tell its kind.

Bamba is read as a Granite hybrid with RoPE, as in llama.cpp. Falcon-H1's factors are already in the
weights; a tied head has the embedding's factor, as in llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge.export.checkpoint.gguf.architectures import (
    ATTENTION,
    ENDS,
    FACTORS,
    GRANITE_EXPERTS,
    INERT,
    MAMBA2,
    OPTIONAL,
    QWEN3,
    ROUTED,
    SIZES,
    TRANSFORMER_BLOCK,
    TREATED,
    WORTH,
    complete_transformer,
    experts_as,
)
from edge.export.checkpoint.gguf.conversion import GgufArchitecture, Metadata, Shapes

MAX_BLOCKS = 4096


def has_tensor(shapes: Shapes, tensor: str, config: dict[str, Any]) -> list[bool]:
    """Return whether each block has a tensor."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or not 0 < count <= MAX_BLOCKS:
        count = 1  # the config is refused elsewhere
    return [f"blk.{n}.{tensor}" in shapes for n in range(count)]


def _complete(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    """Add the fields that hybrids share. Lists of sizes have 0 for blocks of another kind."""
    for name in ("num_key_value_heads", "intermediate_size"):
        sizes = config.get(name)
        if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes):
            config[name] = max(sizes, default=0) or None
    complete_transformer(shapes, metadata, config)
    for name, tensor in (
        ("attention_bias", "attn_q.bias"),
        ("mlp_bias", "ffn_up.bias"),
        ("mamba_conv_bias", "ssm_conv1d.bias"),
    ):
        config[name] = any(has_tensor(shapes, tensor, config))
    inner, width = config.get("mamba_expand"), config.get("hidden_size")
    if isinstance(inner, int) and isinstance(width, int) and width > 0:
        config["mamba_expand"] = inner / width


# -- Falcon-H1, Granite 4.0-H and Jamba: `mamba`, `self_attn` and an MLP -------------------------


def _complete_falcon_h1(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete(shapes, metadata, config)
    config["mamba_rms_norm"] = any(has_tensor(shapes, "ssm_norm.weight", config))


_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.inner_size": "mamba_expand",
    "ssm.state_size": "mamba_d_state",
}
_MAMBA2 = {"ssm.time_step_rank": "mamba_n_heads", "ssm.group_count": "mamba_n_groups"}
_MIXERS = {
    ours: theirs.replace("mixer.", "mamba.")
    for ours, theirs in MAMBA2.block.items()
    if theirs.startswith("mixer.")
} | {ours: theirs for ours, theirs in TRANSFORMER_BLOCK.items() if ours.startswith("attn_")}
_FEED_FORWARD = {
    f"ffn_{which}.{kind}": f"feed_forward.{which}_proj.{kind}"
    for which in ("gate", "up", "down")
    for kind in ("weight", "bias")
}
_FINAL = ENDS | {"output_norm.weight": "model.final_layernorm.weight"}

FALCON_H1 = GgufArchitecture(
    name="falcon-h1",
    required={**SIZES, **ATTENTION, **_MAMBA, **_MAMBA2, "ssm.inner_size": "mamba_d_ssm"},
    optional=OPTIONAL,
    inert=INERT | TREATED,
    fixed={"model_type": "falcon_h1", "hidden_act": "silu", "mamba_norm_before_gate": False},
    ends=_FINAL,
    block={**_MIXERS, **_FEED_FORWARD, "ffn_norm": "pre_ff_layernorm.weight"},
    layer="model.layers",
    complete=_complete_falcon_h1,
)


def _complete_granite(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete(shapes, metadata, config)
    if not config["num_local_experts"]:
        config.setdefault("shared_intermediate_size", config.pop("intermediate_size"))
    uses_rope = metadata.get("rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if uses_rope else "nope"
    attends = has_tensor(shapes, "attn_q.weight", config)
    config["layer_types"] = ["attention" if attending else "mamba" for attending in attends]


GRANITE_HYBRID = replace(
    FALCON_H1,
    name="granitehybrid",
    required={**SIZES, **ATTENTION, **_MAMBA, **_MAMBA2},
    optional={
        **OPTIONAL,
        **FACTORS,
        **experts_as("num_local_experts"),
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    fixed={"model_type": "granitemoehybrid", "hidden_act": "silu", "num_local_experts": 0},
    ends=ENDS,
    block={
        **_MIXERS,
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate.weight": "shared_mlp.input_linear.weight",
        "ffn_up.weight": "shared_mlp.input_linear.weight",
        "ffn_down.weight": "shared_mlp.output_linear.weight",
        **GRANITE_EXPERTS,
    },
    rotated=True,
    complete=_complete_granite,
)


def _complete_jamba(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete(shapes, metadata, config)
    # attention and experts recur at fixed periods; otherwise the reader finds tensors missing
    for what, tensor in (("attn", "attn_q.weight"), ("expert", "ffn_gate_inp.weight")):
        blocks = has_tensor(shapes, tensor, config)
        indices = [block for block, present in enumerate(blocks) if present]
        first, second, *_ = [*indices, len(blocks), 2 * len(blocks) + 1]
        config |= {
            f"{what}_layer_offset": first,
            f"{what}_layer_period": max(first + 1, second - first),
        }


JAMBA = replace(
    FALCON_H1,
    name="jamba",
    required={**SIZES, **ATTENTION, **_MAMBA, "ssm.time_step_rank": "mamba_dt_rank"},
    optional={"attention.head_count_kv": "num_key_value_heads", **experts_as("num_experts")},
    inert=INERT,
    fixed={"model_type": "jamba", "hidden_act": "silu", "num_experts": 1},
    block={
        **_MIXERS,
        **_FEED_FORWARD,
        **{ours: f"feed_forward.{theirs}" for ours, theirs in ROUTED.items()},
        "ffn_gate_inp.weight": "feed_forward.router.weight",
        "ffn_norm.weight": "pre_ff_layernorm.weight",
        "ssm_x.weight": "mamba.x_proj.weight",
        "ssm_dt.weight": "mamba.dt_proj.weight",
        "ssm_dt.bias": "mamba.dt_proj.bias",
        **{f"ssm_{n}_norm.weight": f"mamba.{n}_layernorm.weight" for n in ("dt", "b", "c")},
    },
    complete=_complete_jamba,
)

# -- Nemotron-H: a mixer in every block ----------------------------------------------------------


def _complete_nemotron(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete(shapes, metadata, config)
    config["use_conv_bias"] = config.pop("mamba_conv_bias")
    inner, heads = config.pop("mamba_expand"), config["mamba_num_heads"]
    if isinstance(inner, float) and isinstance(heads, int) and heads > 0:
        config["mamba_head_dim"] = metadata["ssm.inner_size"] // heads
    letters = {"attn_q": "*", "ffn_up": "-", "ffn_up_exps": "E"}
    presence = [has_tensor(shapes, f"{tensor}.weight", config) for tensor in letters]
    config["hybrid_override_pattern"] = "".join(
        next((letter for letter, has in zip(letters.values(), block, strict=True) if has), "M")
        for block in zip(*presence, strict=True)
    )
    config.setdefault("head_dim", 0)


NEMOTRON_H = GgufArchitecture(
    name="nemotron_h",
    required={
        **SIZES,
        **ATTENTION,
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "mamba_expand",
        "ssm.state_size": "ssm_state_size",
        "ssm.time_step_rank": "mamba_num_heads",
        "ssm.group_count": "n_groups",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    },
    optional={
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
    },
    inert=INERT | TREATED | {"attention.layer_norm_epsilon", "rope.freq_base"},
    fixed={"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"},
    ends=MAMBA2.ends,
    block={
        **MAMBA2.block,
        **{
            ours: "mixer." + theirs.rpartition("self_attn.")[2].rpartition("mlp.")[2]
            for ours, theirs in TRANSFORMER_BLOCK.items()
            if "norm" not in ours and "gate" not in ours
        },
    },
    layer="backbone.layers",
    rotated=True,
    sizes=("attention.value_length",),
    complete=_complete_nemotron,
)

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    required={**NEMOTRON_H.required, **experts_as("n_routed_experts")},
    optional={
        **NEMOTRON_H.optional, **WORTH,
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "moe_latent_size": "moe_latent_size",
    },
    inert=NEMOTRON_H.inert | {"expert_shared_count"},
    block={
        **NEMOTRON_H.block,
        **{ours: f"mixer.{theirs}" for ours, theirs in ROUTED.items()},
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
        "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
        "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
    },
    score="sigmoid",
)  # fmt: skip

# -- LFM2: short convolutions --------------------------------------------------------------------


def _complete_lfm2(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete(shapes, metadata, config)
    del config["mamba_conv_bias"]
    config["conv_bias"] = any(has_tensor(shapes, "shortconv.conv.bias", config))
    attends = has_tensor(shapes, "attn_q.weight", config)
    config["layer_types"] = ["full_attention" if attending else "conv" for attending in attends]


LFM2 = replace(
    QWEN3,
    name="lfm2",
    required={
        **SIZES,
        **ATTENTION,
        "attention.layer_norm_rms_epsilon": "norm_eps",
        "shortconv.l_cache": "conv_L_cache",
    },
    fixed={"model_type": "lfm2", "block_auto_adjust_ff_dim": False},
    ends={**ENDS, "token_embd_norm.weight": "model.embedding_norm.weight"},
    block={
        **{ours: theirs for ours, theirs in TRANSFORMER_BLOCK.items() if "attn_" in ours},
        **{
            f"attn_{ours}.weight": f"self_attn.{theirs}.weight"
            for ours, theirs in (
                ("output", "out_proj"), ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")
            )
        },
        "attn_norm.weight": "operator_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        **{
            f"ffn_{ours}.weight": f"feed_forward.{theirs}.weight"
            for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
        **{
            f"shortconv.{name}.{kind}": f"conv.{name}.{kind}"
            for name in ("in_proj", "conv", "out_proj")
            for kind in ("weight", "bias")
        },
    },
    complete=_complete_lfm2,
)  # fmt: skip


def _complete_lfm2_moe(shapes: Shapes, metadata: Metadata, config: dict[str, Any]) -> None:
    _complete_lfm2(shapes, metadata, config)
    config["use_expert_bias"] = any(has_tensor(shapes, "exp_probs_b.bias", config))


LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    required={**LFM2.required, **experts_as("num_experts")},
    optional={
        **LFM2.optional, **WORTH,
        "expert_feed_forward_length": "moe_intermediate_size",
        "leading_dense_block_count": "num_dense_layers",
    },
    fixed={"model_type": "lfm2_moe", "norm_topk_prob": True},
    block={
        **LFM2.block,
        "ffn_gate_inp.weight": "feed_forward.gate.weight",
        "exp_probs_b.bias": "feed_forward.expert_bias",
        **{
            f"ffn_{ours}_exps.weight": f"feed_forward.experts.0.{theirs}.weight"
            for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    },
    score="sigmoid",
    complete=_complete_lfm2_moe,
)  # fmt: skip

HYBRIDS = (FALCON_H1, GRANITE_HYBRID, JAMBA, NEMOTRON_H, NEMOTRON_H_MOE, LFM2, LFM2_MOE)
