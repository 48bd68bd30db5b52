"""Granite 3 with experts and an MLP shared by all tokens.

Source: transformers 5.23 models/granitemoeshared, `GraniteMoeSharedForCausalLM`. A width of 0 means
no shared MLP, and then the model is one of `granitemoe`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import granitemoe, granitemoehybrid
from edge.export.checkpoint.family import Family, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "granitemoeshared"


def read(fields: Fields) -> Layout:
    if not fields.integer("shared_intermediate_size", 0, low=0):
        del fields.values["shared_intermediate_size"]
        return granitemoe.read(fields)
    known_only(fields, granitemoe.OWN | {"shared_intermediate_size"})
    fields.demand("hidden_act", "silu")
    blocks = fields.blocks()
    return granitemoehybrid.read_blocks(fields, NAME, [True] * blocks, turned=True)


FAMILY = Family.of_transformers(NAME, "GraniteMoeSharedForCausalLM", read)
