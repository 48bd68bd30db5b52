"""Arcee (AFM-4.5B): Llama's attention, and MLPs with squared ReLU and no gate.

Source: transformers 5.23 models/arcee, `ArceeForCausalLM`.
"""

from __future__ import annotations

from edge.config import MlpConfig
from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "arcee"
_OWN = {"attention_bias", "head_dim", "mlp_bias"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    fields.demand("hidden_act", "relu2")
    mlp = fields.build(
        MlpConfig,
        form="squared_relu",
        d_intermediate=fields.integer("intermediate_size"),
        bias=fields.boolean("mlp_bias", False),
    )
    return llama.read_blocks(
        fields, NAME, context=positions(fields, 4096), eps=1e-5, feed=lambda block: [mlp]
    )


FAMILY = Family.of_transformers(NAME, "ArceeForCausalLM", read)
