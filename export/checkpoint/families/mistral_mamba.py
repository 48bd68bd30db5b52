"""Codestral Mamba in mistral-inference's form: params.json and consolidated.safetensors.

Source: mistral-inference, args.py (`MambaArgs`) and mamba.py: the fields are those of a
state-spaces config with Mamba-2 layers, and tensor names begin with `model`.
"""

from __future__ import annotations

from edge.export.checkpoint import state_spaces
from edge.export.checkpoint.family import Family
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "mamba2"
_RENAMED = {
    "dim": "d_model", "n_layers": "n_layer", "vocab_size": "vocab_size", "rms_norm": "rms_norm",
    "pad_vocab_size_multiple": "pad_vocab_size_multiple", "tie_embeddings": "tie_embeddings",
}  # fmt: skip
_INERT = {"fused_add_norm", "model_type", "residual_in_fp32"}


def claims(fields: Fields) -> bool:
    is_mamba = fields.values.get("model_type") == "mamba"
    return is_mamba and all(name in fields for name in ("dim", "n_layers", "n_groups"))


def read(fields: Fields) -> Layout:
    fields.known_only({*_RENAMED, *_INERT, "n_groups"})
    for name in ("dim", "n_layers", "n_groups"):
        fields.integer(name)
    fields.check()  # report faults by this file's names, not by state-spaces'
    values = {ours: fields.values[name] for name, ours in _RENAMED.items() if name in fields}
    values["ssm_cfg"] = {"layer": "Mamba2", "ngroups": fields.values["n_groups"]}
    layout = state_spaces.read(Fields(fields.file, values), NAME)
    layout.rename = lambda name: name.removeprefix("model.")
    return layout


# first, because its model_type is Mamba's
FAMILY = Family(
    "mistral_mamba", "mistral-inference's params.json of model_type mamba", claims, read, first=True
)
