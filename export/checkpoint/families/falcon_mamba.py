"""Falcon-Mamba: Mamba-1 whose dt of low rank, B and C are normed, by norms without weights.

Source: transformers 5.23 models/falcon_mamba, `FalconMambaForCausalLM`: the norms stand between
`x_proj` and `dt_proj`, and add `mixer_rms_eps`.
"""

from __future__ import annotations

import math

from edge.config import Mamba1Config
from edge.export.checkpoint import state_spaces
from edge.export.checkpoint.families import mamba
from edge.export.checkpoint.family import (
    UNSUPPORTED,
    Family,
    known_only,
    whole,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "falcon_mamba"
_OWN = mamba.OWN | {"mixer_rms_eps", "use_falcon_mambapy"}


def read(fields: Fields) -> Layout:
    """Config and tensor places; raises CheckpointError for a bad field."""
    known_only(fields, _OWN)
    width = fields.integer("hidden_size")
    fields.demand("hidden_act", "silu", UNSUPPORTED)
    automatic = fields.values.get("time_step_rank") in (None, "auto")
    # falcon-mamba-7b's config says expand 16, and the width that it has
    stated = "intermediate_size" in fields
    inner = fields.integer("intermediate_size") if stated else fields.scaled("expand", width, 2)
    mixer = fields.build(
        Mamba1Config,
        d_inner=inner,
        d_state=fields.integer("state_size", 16),
        d_conv=fields.taps("conv_kernel"),
        dt_rank=math.ceil(width / 16) if automatic else fields.integer("time_step_rank"),
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=fields.boolean("use_bias", False),
        inner_eps=fields.epsilon("mixer_rms_eps", 1e-6),
    )
    layers = [mixer] * fields.integer("num_hidden_layers", high=4096)
    config = whole(fields, NAME, layers, norm="layer_norm_epsilon", tied=True)
    layout = state_spaces.place_transformers(config)
    for name in [name for name in layout.pieces if name.endswith("_norm.weight")]:
        del layout.pieces[name]
        layout.constants[name] = 1.0
    return layout


FAMILY = Family.of_transformers(NAME, "FalconMambaForCausalLM", read)
