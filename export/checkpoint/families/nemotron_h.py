"""Nemotron-H: layers of Mamba-2, attention without position encoding, and MLPs with squared ReLU,
or experts of that form next to an MLP shared by all tokens.

Source: transformers 5.23 models/nemotron_h, `NemotronHForCausalLM`, and NVIDIA's class published
with the weights. transformers clamps dt to at least `time_step_min` in prefill but not in decode.
NVIDIA's kernels never do, and neither does this reader: only `time_step_limit` is a limit.
"""

from __future__ import annotations

from typing import Any

from edge.config import AttentionConfig, Mamba2Config, MlpConfig, ModelConfig
from edge.export.checkpoint.family import Family, attention, experts, known_only, layer_types, whole
from edge.export.checkpoint.fields import MAX_BLOCKS, Fields, show
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.state_spaces import mamba2_of

NAME = "nemotron_h"
_OWN = {
    "attention_bias", "attention_head_dim", "chunk_size", "conv_kernel", "expand", "head_dim",
    "hybrid_override_pattern", "layer_norm_epsilon", "layer_types", "layers_block_type",
    "mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "mamba_proj_bias",
    "mamba_ssm_cache_dtype", "mlp_bias", "mlp_hidden_act", "n_groups", "norm_eps",
    "ssm_state_size", "time_step_limit", "time_step_rank", "use_bias", "use_conv_bias",
}  # fmt: skip
# moe_shared_expert_overlap only concerns scheduling; layers that predict further tokens are absent
_MOE_FIELDS = {
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap", "mtp_layers_block_type", "n_group", "n_routed_experts",
    "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_nextn_predict_layers",
    "routed_scaling_factor", "topk_group",
}  # fmt: skip
_NAMES = {
    "latent_in": "fc1_latent_proj", "latent_out": "fc2_latent_proj",
    "router": "gate",
}  # fmt: skip
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp", "moe": "moe",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN | _MOE_FIELDS)
    fields.demand("mamba_hidden_act", "silu")
    fields.demand("mlp_hidden_act", "relu2")
    fields.demand("attention_bias", False)
    kinds = _kinds(fields)
    mixers: dict[str, list[Any]] = {
        "mamba": [_mamba(fields)],
        "attention": [_attention(fields)],
        "mlp": [_mlp(fields, "intermediate_size", 21504)],
        "moe": _experts(fields) if "moe" in kinds else [],
    }
    context = fields.integer("max_position_embeddings", 4096)
    layers = [layer for kind in kinds for layer in mixers[kind]]
    config = whole(fields, NAME, layers, norm="layer_norm_epsilon", context=context)
    return _place(config, kinds)


def _kinds(fields: Fields) -> list[str]:
    """Return the kind of every layer, from letters in `hybrid_override_pattern` or from words."""
    name, pattern = "hybrid_override_pattern", fields.values.get("hybrid_override_pattern")
    kinds = ["mamba"]  # stands in for a refused value
    if pattern is None:
        name = "layer_types" if "layer_types" in fields else "layers_block_type"
        listed = fields.values.get(name)
        if listed is None:
            fields.refuse("hybrid_override_pattern", "is missing")
        kinds = layer_types(fields, len(listed) if isinstance(listed, list) else 1, _KINDS, "mamba")
    elif isinstance(pattern, str) and pattern and set(pattern) <= _LETTERS.keys():
        kinds = [_LETTERS[letter] for letter in pattern]
    else:
        fields.refuse(name, f"is {show(pattern)}, not a string of {''.join(_LETTERS)}")
    if not 0 < len(kinds) <= 2 * MAX_BLOCKS:
        fields.refuse(name, f"has {len(kinds)} layers, outside 1 to {2 * MAX_BLOCKS}")
        kinds = ["mamba"]
    return kinds


def _mlp(fields: Fields, width: str, default: int, *, parallel: bool = False) -> MlpConfig:
    return fields.build(
        MlpConfig,
        d_intermediate=fields.integer(width, default),
        bias=fields.boolean("mlp_bias", False),
        form="squared_relu",
        parallel=parallel,
    )


def _experts(fields: Fields) -> list[Any]:
    """Read the experts and the MLP next to them."""
    latent = fields.integer("moe_latent_size") if "moe_latent_size" in fields else None
    if latent is not None:
        fields.demand("mlp_bias", False)
    moe = experts(
        fields,
        fields.integer("n_routed_experts", 8),
        fields.integer("moe_intermediate_size", 7688),
        form="squared_relu",
        d_latent=latent,
        score="sigmoid",
        correction=True,
        normalise=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
    )
    return [moe, _mlp(fields, "moe_shared_expert_intermediate_size", 7688, parallel=True)]


def _mamba(fields: Fields) -> Mamba2Config:
    heads, size = fields.integer("mamba_num_heads", 128), fields.integer("mamba_head_dim", 64)
    names = "ssm_state_size conv_kernel n_groups use_conv_bias use_bias"
    return mamba2_of(fields, heads * size, size, names, groups=8)


def _attention(fields: Fields) -> AttentionConfig:
    name = "attention_head_dim" if "attention_head_dim" in fields else "head_dim"
    return attention(fields, kv_heads=8, size=fields.integer(name, 128))


def _place(config: ModelConfig, kinds: list[str]) -> Layout:
    def renamed(name: str) -> str:  # transformers' own name for nvidia's
        return name.replace("model.", "backbone.", 1) if name.startswith("model.") else name

    layout = Layout(config, rename=renamed)
    index = 0
    for block, kind in enumerate(kinds):
        source = f"backbone.layers.{block}"
        layout.place_layer(index, norm=f"{source}.norm", mixer=f"{source}.mixer", rename=_NAMES)
        if kind == "moe":
            bias = f"{source}.mixer.gate.e_score_correction_bias"
            layout.place(f"layers.{index}.router.bias", bias)
            index += 1
            shared = f"{source}.mixer.shared_experts"
            layout.place_layer(index, norm=f"{source}.norm", mixer=shared)
        index += 1
    layout.place_ends("backbone.norm_f", embedding="backbone.embeddings.weight")
    return layout


FAMILY = Family.of_transformers(NAME, "NemotronHForCausalLM", read)
