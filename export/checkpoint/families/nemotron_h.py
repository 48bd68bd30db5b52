"""Nemotron-H: layers of Mamba-2, of attention without positions and of MLPs with squared ReLU.

Source: transformers 5.23 models/nemotron_h, `NemotronHForCausalLM`, and nvidia's own class beside
the weights. transformers clamps dt to `time_step_min` and more in runs, and not in steps; nvidia's
kernels do neither, and nor is it done here: `time_step_limit` alone is a limit. Layers of experts
are refused.
"""

from __future__ import annotations

from typing import Any

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig, NormConfig
from edge.export.checkpoint.family import (
    MAX_BLOCKS,
    UNSUPPORTED,
    Family,
    is_transformers,
    known_only,
    layer_types,
)
from edge.export.checkpoint.fields import Fields, show
from edge.export.checkpoint.layout import Layout

NAME = "nemotron_h"
_OWN = {
    "attention_bias", "attention_head_dim", "chunk_size", "conv_kernel", "expand", "head_dim",
    "hybrid_override_pattern", "layer_norm_epsilon", "layer_types", "layers_block_type",
    "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "mamba_proj_bias",
    "mamba_ssm_cache_dtype", "mlp_bias", "mlp_hidden_act", "n_groups", "norm_eps",
    "ssm_state_size", "time_step_limit", "time_step_rank", "use_bias", "use_conv_bias",
}  # fmt: skip
# Of layers that a dense model does not have, though its config may speak of them.
_OF_EXPERTS = {
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap", "mtp_layers_block_type", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_nextn_predict_layers",
    "routed_scaling_factor", "topk_group",
}  # fmt: skip
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def claims(fields: Fields) -> bool:
    return is_transformers(fields, NAME, "NemotronHForCausalLM")


def read(fields: Fields) -> Layout:
    """Config and tensor places; raises CheckpointError for a bad field."""
    known_only(fields, _OWN | _OF_EXPERTS)
    fields.demand("mamba_hidden_act", "silu", UNSUPPORTED)
    fields.demand("mlp_hidden_act", "relu2", UNSUPPORTED)
    fields.demand("attention_bias", False, UNSUPPORTED)
    kinds = _kinds(fields)
    made: dict[str, Any] = {
        "mamba": _mamba(fields),
        "attention": _attention(fields),
        "mlp": fields.build(
            MlpConfig,
            d_intermediate=fields.integer("intermediate_size", 21504),
            bias=fields.boolean("mlp_bias", False),
            form="squared_relu",
        ),
    }
    context = fields.integer("max_position_embeddings", 4096)
    config = fields.model(
        family=NAME,
        vocab_size=fields.integer("vocab_size"),
        d_model=fields.integer("hidden_size"),
        layers=[made[kind] for kind in kinds],
        norm=fields.build(NormConfig, eps=fields.epsilon("layer_norm_epsilon", 1e-5)),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        max_context=context if "attention" in kinds else None,
    )
    return _place(config)


def _kinds(fields: Fields) -> list[str]:
    """The kind of every layer: by `hybrid_override_pattern`, as M*-E, or in words."""
    name, pattern = "hybrid_override_pattern", fields.values.get("hybrid_override_pattern")
    found = ["mamba"]  # in place of what is refused
    if pattern is None:
        name = "layer_types" if "layer_types" in fields else "layers_block_type"
        given = fields.values.get(name)
        if given is None:
            fields.refuse("hybrid_override_pattern", "is missing")
        found = layer_types(fields, len(given) if isinstance(given, list) else 1, _KINDS, "mamba")
    elif isinstance(pattern, str) and pattern and set(pattern) <= _LETTERS.keys():
        found = [_LETTERS[letter] for letter in pattern]
    else:
        fields.refuse(name, f"is {show(pattern)}, not a string of {''.join(_LETTERS)}")
    if not 0 < len(found) <= 2 * MAX_BLOCKS:
        fields.refuse(name, f"has {len(found)} layers, outside 1 to {2 * MAX_BLOCKS}")
        found = ["mamba"]
    if experts := found.count("moe"):
        fields.refuse(name, f"has {experts} layers of experts", "these are not read yet")
        found = ["mamba"]
    return found


def _mamba(fields: Fields) -> Mamba2Config:
    heads, size = fields.integer("mamba_num_heads", 128), fields.integer("mamba_head_dim", 64)
    return fields.build(
        Mamba2Config,
        d_inner=heads * size,
        d_ssm=heads * size,
        d_state=fields.integer("ssm_state_size", 128),
        d_conv=fields.taps("conv_kernel"),
        head_dim=size,
        n_groups=fields.integer("n_groups", 8),
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=fields.boolean("use_bias", False),
        dt_limit=fields.limits("time_step_limit"),
    )


def _attention(fields: Fields) -> AttentionConfig:
    name = "attention_head_dim" if "attention_head_dim" in fields else "head_dim"
    return fields.build(
        AttentionConfig,
        n_heads=fields.integer("num_attention_heads", 32),
        n_kv_heads=fields.integer("num_key_value_heads", 8),
        head_dim=fields.integer(name, 128),
    )


def _place(config: ModelConfig) -> Layout:
    def named(name: str) -> str:  # transformers' own name for nvidia's
        return name.replace("model.", "backbone.", 1) if name.startswith("model.") else name

    layout = Layout(config, rename=named)
    for index in range(len(config.layers)):
        source = f"backbone.layers.{index}"
        layout.place_layer(
            index, norm=f"{source}.norm", mixer=f"{source}.mixer", rename={"gated_norm": "norm"}
        )
    layout.place_ends(
        embedding="backbone.embeddings.weight", norm_f="backbone.norm_f", lm_head="lm_head.weight"
    )
    return layout


FAMILY = Family(NAME, "model_type nemotron_h, without experts", claims, read)
