"""Gemma 3 for text alone (270M and 1B): as Gemma, with norms before and behind, and normed heads.

Source: transformers 5.23 models/gemma3, `Gemma3ForCausalLM`. Most blocks look back a window of 512
tokens.
"""

from __future__ import annotations

import math

from edge.config import AttentionConfig
from edge.export.checkpoint.families import gemma
from edge.export.checkpoint.family import (
    Family,
    for_kind,
    known_only,
    positions,
    sliding_kinds,
    windows,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "gemma3_text"
_OWN = gemma.OWN | {
    "layer_types", "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window",
    "sliding_window_pattern",
}  # fmt: skip
# the field of its base, and what that is where nothing is said
_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    if fields.values.get("hidden_activation") not in (None, gemma.TANH):
        gemma.refuse_activation(fields, "hidden_activation")
    period = fields.integer("sliding_window_pattern", 6)
    kinds = sliding_kinds(fields, lambda at: (at + 1) % period > 0)
    said = {kind: for_kind(fields, kind, *_BASES[kind]) for kind in sorted({*kinds})}
    context = positions(said.get("full_attention", fields), 131072)
    layout = gemma.read_blocks(
        fields,
        NAME,
        "both",
        context=context,
        windows=windows(fields, kinds, context),
        kv_heads=4,
        turned=[said[kind] for kind in kinds],
        qk_norm=True,
    )
    scalar = fields.number("query_pre_attn_scalar", 256.0)
    if not scalar > 0:
        fields.stop("query_pre_attn_scalar", f"is {scalar}, not above 0")
    for index, layer in enumerate(layout.config.layers):
        if isinstance(layer, AttentionConfig):  # which divides by sqrt(head_dim)
            layout.multiply(f"layers.{index}.q_norm", math.sqrt(layer.head_dim / scalar))
    return layout


FAMILY = Family.of_transformers(NAME, "Gemma3ForCausalLM", read)
