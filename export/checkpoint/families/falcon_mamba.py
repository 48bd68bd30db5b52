"""Falcon-Mamba: Mamba-1 with norms, without weights, on low-rank dt, B and C.

Source: transformers 5.23 models/falcon_mamba, `FalconMambaForCausalLM`: the norms are between
`x_proj` and `dt_proj`, with epsilon `mixer_rms_eps`.
"""

from __future__ import annotations

from edge.export.checkpoint import state_spaces
from edge.export.checkpoint.families import mamba
from edge.export.checkpoint.family import Family, known_only, whole
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "falcon_mamba"
_OWN = mamba.OWN | {"mixer_rms_eps", "use_falcon_mambapy"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    width = fields.integer("hidden_size")
    fields.demand("hidden_act", "silu")
    # falcon-mamba-7b's config has a wrong expand, 16, and the true width
    stated = (
        {"d_inner": fields.integer("intermediate_size")} if "intermediate_size" in fields else {}
    )
    eps = fields.epsilon("mixer_rms_eps", 1e-6)
    mixer = state_spaces.mamba1_of(fields, width, mamba.MIXER, inner_eps=eps, **stated)
    layers = [mixer] * fields.integer("num_hidden_layers", high=4096)
    config = whole(fields, NAME, layers, norm="layer_norm_epsilon", tied=True)
    layout = state_spaces.place_transformers(config)
    for name in [name for name in layout.pieces if name.endswith("_norm.weight")]:
        del layout.pieces[name]
        layout.constants[name] = 1.0
    return layout


FAMILY = Family.of_transformers(NAME, "FalconMambaForCausalLM", read)
