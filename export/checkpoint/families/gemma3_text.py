"""Gemma 3 for text only (270M and 1B): like Gemma, with norms before and after, and normed heads.

Source: transformers 5.23 models/gemma3, `Gemma3ForCausalLM`. Most blocks have a window of 512
tokens.
"""

from __future__ import annotations

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
# kind of attention → field of its RoPE base, and the default
_BASES = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    gemma.demand_tanh(fields)
    period = fields.integer("sliding_window_pattern", 6)
    kinds = sliding_kinds(fields, lambda block: (block + 1) % period > 0)
    fields_by_kind = {kind: for_kind(fields, kind, *_BASES[kind]) for kind in sorted({*kinds})}
    context = positions(fields_by_kind.get("full_attention", fields), 131072)
    layout = gemma.read_blocks(
        fields,
        NAME,
        "both",
        context=context,
        windows=windows(fields, kinds, context),
        kv_heads=4,
        turned=[fields_by_kind[kind] for kind in kinds],
        qk_norm=True,
    )
    gemma.scale_scores(fields, layout, "q_norm")
    return layout


FAMILY = Family.of_transformers(NAME, "Gemma3ForCausalLM", read)
