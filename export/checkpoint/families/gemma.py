"""Gemma 1: Llama's blocks, with norms of 1 + weight, scaled embeddings, and a GELU gate.

Source: transformers 5.23 models/gemma, `GemmaForCausalLM`, which reads `gelu` as its tanh form.
"""

from __future__ import annotations

import math
from typing import Any

from edge.config import AttentionConfig, MlpConfig
from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions
from edge.export.checkpoint.fields import UNSUPPORTED, Fields, show
from edge.export.checkpoint.layout import Layout

NAME = "gemma"
OWN = {"attention_bias", "head_dim", "hidden_activation", "use_bidirectional_attention"}
TANH = "gelu_pytorch_tanh"


def read(fields: Fields) -> Layout:
    known_only(fields, OWN)
    # published files have one or both, and the class uses neither
    for name in ("hidden_act", "hidden_activation"):
        if fields.values.get(name) not in (None, "gelu", TANH):
            refuse_activation(fields, name)
    return read_blocks(fields, NAME, context=positions(fields, 8192), kv_heads=16)


def refuse_activation(fields: Fields, name: str) -> None:
    value = show(fields.values.get(name))
    fields.refuse(name, f"is {value}; only {show(TANH)} is supported", UNSUPPORTED)


def demand_tanh(fields: Fields) -> None:
    """Refuse any `hidden_activation` but GELU's tanh form, in models with no other such field."""
    if fields.values.get("hidden_activation") not in (None, TANH):
        refuse_activation(fields, "hidden_activation")


def scale_scores(fields: Fields, layout: Layout, module: str) -> None:
    """Divide scores by the root of `query_pre_attn_scalar`, by scaling the weights of `module`."""
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        fields.stop("query_pre_attn_scalar", f"is {scalar}, not above 0")
    # attention divides by sqrt(head_dim)
    for index, layer in layout.config.layers_of(AttentionConfig).items():
        layout.multiply(f"layers.{index}.{module}", math.sqrt(layer.head_dim / scalar))


def read_blocks(fields: Fields, family: str, norms: Any = "before", **values: Any) -> Layout:
    """Read the layout of Gemma and its relatives; `values` as in `llama.read_blocks`."""
    fields.demand("use_bidirectional_attention", False)
    mlp = fields.build(
        MlpConfig,
        d_intermediate=fields.integer("intermediate_size"),
        form="geglu_tanh",
        norms=norms,
    )
    layout = llama.read_blocks(
        fields, family, size=256, tied=True, feed=lambda block: [mlp], norms=norms, **values
    )
    layout.add_to_norms(1.0)
    layout.multiply_ends(math.sqrt(layout.config.d_model), 1.0)
    return layout


FAMILY = Family.of_transformers(NAME, "GemmaForCausalLM", read)
