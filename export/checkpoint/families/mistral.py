"""Mistral: Llama's blocks without biases, whose attention may have a sliding window.

Source: transformers 5.23 models/mistral, `MistralForCausalLM`. A window that covers the whole
context is dropped, and the model is then Llama's.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import SLIDING, Family, known_only, positions, windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "mistral"
_OWN = {"head_dim", "sliding_window"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    context = positions(fields, 1 << 17)
    blocks = fields.blocks()
    sliding = windows(fields, [SLIDING] * blocks, context)
    return llama.read_blocks(fields, NAME, kv_heads=8, context=context, windows=sliding)


FAMILY = Family.of_transformers(NAME, "MistralForCausalLM", read)
