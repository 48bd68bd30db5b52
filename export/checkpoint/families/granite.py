"""Granite 3: Llama's blocks, with factors on embedding, attention, residual stream and logits.

Source: transformers 5.23 models/granite, `GraniteForCausalLM`. The factors are moved into weights
(`Layout.multiply`).
"""

from __future__ import annotations

import math

from edge.config import AttentionConfig
from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "granite"
FACTORS = {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
_OUTPUT_MODULES = {
    "attention": "o_proj",
    "experts": "down_proj",
    "mlp": "down_proj",
    "mamba2": "out_proj",
}


def read(fields: Fields) -> Layout:
    known_only(fields, FACTORS | {"attention_bias", "mlp_bias"})
    layout = llama.read_blocks(fields, NAME, context=positions(fields, 2048))
    return multiplied(fields, layout)


def multiplied(fields: Fields, layout: Layout) -> Layout:
    """Return the layout with the config's factors moved into its weights."""
    residual = fields.number("residual_multiplier", 1.0)
    scale = fields.number("attention_multiplier", 1.0)
    embedding, logits = (
        fields.number(name, 1.0) for name in ("embedding_multiplier", "logits_scaling")
    )
    for name, value in (("embedding_multiplier", embedding), ("logits_scaling", logits)):
        if not value > 0:
            fields.refuse(name, f"is {value}, not above 0")
    fields.check()
    # attention divides by sqrt(head_dim)
    for index, attention in layout.config.layers_of(AttentionConfig).items():
        layout.multiply(f"layers.{index}.q_proj", scale * math.sqrt(attention.head_dim))
    for index, layer in enumerate(layout.config.layers):
        layout.multiply(f"layers.{index}.{_OUTPUT_MODULES[layer.kind]}", residual)
    layout.multiply_ends(embedding, 1 / logits)
    return layout


FAMILY = Family.of_transformers(NAME, "GraniteForCausalLM", read)
