"""Gemma 2: like Gemma, with norms before and after, and soft caps on scores and logits.

Source: transformers 5.23 models/gemma2, `Gemma2ForCausalLM`. Every second block has a window.
"""

from __future__ import annotations

from edge.export.checkpoint.families import gemma
from edge.export.checkpoint.family import (
    Family,
    known_only,
    positions,
    sliding_kinds,
    windows,
)
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "gemma2"
_OWN = gemma.OWN | {
    "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "query_pre_attn_scalar",
    "sliding_window",
}  # fmt: skip


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    gemma.demand_tanh(fields)
    kinds = sliding_kinds(fields, lambda block: block % 2 == 0)
    context = positions(fields, 8192)
    layout = gemma.read_blocks(
        fields,
        NAME,
        "both",
        context=context,
        windows=windows(fields, kinds, context),
        kv_heads=4,
        softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        logits_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
    )
    gemma.scale_scores(fields, layout, "q_proj")
    return layout


def _softcap(fields: Fields, name: str, default: float) -> float | None:
    """Read a soft cap; null means none."""
    if fields.values.get(name, default) is None:
        return None
    cap = fields.number(name, default)
    if not 0 < cap <= 1e6:
        fields.refuse(name, f"is {cap}, not above 0 and at most a million")
        return None
    return cap


FAMILY = Family.of_transformers(NAME, "Gemma2ForCausalLM", read)
