"""Bamba: blocks of Mamba-2 or attention, each followed by a gated MLP.

Source: transformers 5.23 models/bamba, `BambaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.config import (
    AttentionConfig,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
)
from edge.export.checkpoint.family import Family, attention, known_only, rope, whole
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.state_spaces import heads_of, mamba2_of

NAME = "bamba"
MAMBA = {
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state",
    "mamba_expand", "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
}  # fmt: skip
_OWN = MAMBA | {
    "attention_bias",
    "attn_layer_indices",
    "attn_rotary_emb",
    "head_dim",
    "mlp_bias",
    "partial_rotary_factor",
    "z_loss_coefficient",
}
_MAMBA2 = "mamba_d_state mamba_d_conv mamba_n_groups mamba_conv_bias mamba_proj_bias"
MLP = ("pre_ff_layernorm", "feed_forward")
ROTATED = 0.5  # the class sets partial_rotary_factor whenever rope_parameters does not


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    blocks = fields.blocks()
    attends = set(fields.indices("attn_layer_indices", blocks))
    fields.demand("hidden_act", "silu")
    mamba, attn = mamba2(fields), _attention(fields)
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
    )
    layers: list[Any] = []
    for block in range(blocks):
        layers += [attn if block in attends else mamba, mlp]
    context = fields.integer("max_position_embeddings", 262144)
    config = whole(fields, NAME, layers, context=context)
    layout = place(config, [block in attends for block in range(blocks)])
    layout.ignored = lambda name: name.endswith("rotary_emb.inv_freq")
    return layout


def mamba2(fields: Fields, width: str = "mamba_expand", **values: Any) -> Mamba2Config:
    """Read Mamba-2 from the fields `mamba_*` of Bamba and its relatives; `values` are further
    arguments.

    `width` names the field of its width: `mamba_expand` is a factor on the model's width, any other
    the width itself.
    """
    expanded = width == "mamba_expand"
    hidden = fields.integer("hidden_size")
    d_inner = fields.scaled(width, hidden, 2) if expanded else fields.integer(width)
    heads = fields.integer("mamba_n_heads", 128)
    automatic = fields.values.get("mamba_d_head") in (None, "auto")
    head_dim = max(1, d_inner // heads) if automatic else fields.integer("mamba_d_head")
    heads_of(fields, "mamba_n_heads", heads, head_dim, d_inner)
    values["d_state"] = fields.integer("mamba_d_state", 256)
    return mamba2_of(fields, d_inner, head_dim, _MAMBA2, **values)


def _attention(fields: Fields) -> AttentionConfig:
    heads = fields.integer("num_attention_heads", 32)
    size = fields.integer("head_dim", max(1, fields.integer("hidden_size") // heads))
    bias = fields.boolean("attention_bias", False)
    # like the class, ignore an older `partial_rotary_factor` outside rope_parameters
    rotation = rope(fields, size, share=ROTATED, kinds=("default",))
    return attention(fields, size=size, bias=bias, rope=rotation)


def place(
    config: ModelConfig, attends: Sequence[bool], rename: dict[str, str] | None = None
) -> Layout:
    """Place blocks of `self_attn` or `mamba`, then `feed_forward`, named as in Jamba too.

    `rename`: canonical names within a mixer → the checkpoint's.
    """
    layout = Layout(config)
    for block, attending in enumerate(attends):
        mixer = ("input_layernorm", "self_attn" if attending else "mamba")
        layout.place_block(2 * block, f"model.layers.{block}", mixer, MLP, rename=rename)
    layout.place_ends("model.final_layernorm")
    return layout


FAMILY = Family.of_transformers(NAME, "BambaForCausalLM", read)
