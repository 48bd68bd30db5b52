"""Mamba-1: state-spaces' original checkpoints and transformers' `MambaForCausalLM`.

Source: transformers 5.23 models/mamba. The `time_step_*` fields, except the rank, only concern
initialisation.
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

NAME = "mamba"
OWN = state_spaces.FIELDS | {
    "conv_kernel", "expand", "layer_norm_epsilon", "state_size", "time_step_rank",
    "use_associative_scan", "use_bias", "use_conv_bias",
}  # fmt: skip

MIXER = "expand state_size conv_kernel time_step_rank use_conv_bias use_bias"


def claims(fields: Fields) -> bool:
    """Claim state-spaces configs with any layer but Mamba2, to refuse unknown layers here."""
    if is_transformers(fields, "mamba", "MambaForCausalLM"):
        return True
    return is_state_spaces(fields) and state_spaces.ssm_layer(fields) != "Mamba2"


def read(fields: Fields) -> Layout:
    if is_state_spaces(fields):
        return state_spaces.read(fields, NAME)
    known_only(fields, OWN)
    fields.demand("hidden_act", "silu")
    mixer = state_spaces.mamba1_of(fields, fields.integer("hidden_size"), MIXER)
    layers = [mixer] * fields.integer("num_hidden_layers", high=4096)
    config = whole(fields, NAME, layers, norm="layer_norm_epsilon", tied=True)
    return state_spaces.place_transformers(config)


FAMILY = Family(NAME, "model_type mamba, or state-spaces' d_model and n_layer", claims, read)
