"""Granite 3 with experts: Granite 3 with a mixture of experts in place of each MLP.

Source: transformers 5.23 models/granitemoe, `GraniteMoeForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import granite, granitemoehybrid, llama
from edge.export.checkpoint.family import Family, experts, known_only, positions
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "granitemoe"
OWN = granite.FACTORS | {"attention_bias", "num_experts_per_tok", "num_local_experts"}


def read(fields: Fields) -> Layout:
    known_only(fields, OWN)
    count, width = fields.integer("num_local_experts", 8), fields.integer("intermediate_size")
    moe = experts(fields, count, width)
    layout = llama.read_blocks(
        fields,
        NAME,
        context=positions(fields, 2048),
        feed=lambda block: [moe],
    )
    for index in range(1, len(layout.config.layers), 2):
        granitemoehybrid.place_experts(layout, index, f"model.layers.{index // 2}")
    return granite.multiplied(fields, layout)


FAMILY = Family.of_transformers(NAME, "GraniteMoeForCausalLM", read)
