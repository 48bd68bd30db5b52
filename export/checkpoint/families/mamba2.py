"""Mamba-2: state-spaces' original checkpoints and transformers' `Mamba2ForCausalLM`.

Source: transformers 5.23 models/mamba2. Its gated norm works per group of d_inner/n_groups, as
here; versions before 4.57 normalised the whole width. `norm_before_gate` in Codestral Mamba's
config is ignored, as in transformers: the norm follows the gate.
"""

from __future__ import annotations

from edge.export.checkpoint import state_spaces
from edge.export.checkpoint.family import (
    Family,
    is_state_spaces,
    is_transformers,
    known_only,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "mamba2"
_OWN = state_spaces.FIELDS | {
    "chunk_size", "conv_kernel", "expand", "head_dim", "layer_norm_epsilon", "n_groups",
    "norm_before_gate", "num_heads", "state_size", "time_step_limit", "time_step_rank",
    "use_bias", "use_conv_bias",
}  # fmt: skip

MIXER = "state_size conv_kernel n_groups use_conv_bias use_bias"


def claims(fields: Fields) -> bool:
    if is_transformers(fields, "mamba2", "Mamba2ForCausalLM"):
        return True
    return is_state_spaces(fields) and state_spaces.ssm_layer(fields) == "Mamba2"


def read(fields: Fields) -> Layout:
    if is_state_spaces(fields):
        return state_spaces.read(fields, NAME)
    known_only(fields, _OWN)
    width = fields.integer("hidden_size")
    d_inner = fields.scaled("expand", width, 2)
    head_dim = fields.integer("head_dim", 64)
    heads = fields.integer("num_heads", max(1, d_inner // head_dim))
    state_spaces.heads_of(fields, "num_heads", heads, head_dim, d_inner)
    fields.demand("hidden_act", "silu")
    mixer = state_spaces.mamba2_of(fields, d_inner, head_dim, MIXER, groups=8)
    layers = [mixer] * fields.integer("num_hidden_layers", high=4096)
    config = whole(fields, NAME, layers, norm="layer_norm_epsilon")
    return state_spaces.place_transformers(config)


FAMILY = Family(
    NAME, "model_type mamba2, or state-spaces' d_model, n_layer and ssm_cfg.layer Mamba2",
    claims, read,
)  # fmt: skip
