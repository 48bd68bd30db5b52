"""Qwen3.5 with experts, plus a gated expert shared by all tokens.

Source: transformers 5.23 models/qwen3_5_moe, `Qwen3_5MoeForCausalLM`, and the language model of
`Qwen3_5MoeForConditionalGeneration`. Files have the experts' matrices separately or stacked.
"""

from __future__ import annotations

from edge.export.checkpoint.families import qwen2_moe, qwen3_5, qwen3_moe
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen3_5_moe"


def read(fields: Fields) -> Layout:
    text = qwen3_5.of_the_text(fields, qwen3_5.OWN | qwen2_moe.OWN)
    moe = qwen3_moe.routed(text, 256, 512, per_token=8, normalise=True)
    shared = qwen2_moe.shared(text, 512)
    layout = qwen3_5.read_blocks(text, NAME, lambda block: [moe, shared], kv_heads=2)
    qwen2_moe.place_shared(layout)
    qwen2_moe.place_stacks(layout)
    return layout


FAMILY = qwen3_5.family(NAME, "Qwen3_5Moe", read)
