"""Qwen2 and Qwen2.5: Llama's blocks, with biases of q, k and v.

Source: transformers 5.23 models/qwen2, `Qwen2ForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions, used_windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen2"
OWN = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


def read(fields: Fields) -> Layout:
    known_only(fields, OWN)
    context = positions(fields, 32768)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=32,
        context=context,
        windows=used_windows(fields, context),
        attention_bias=True,
        out_bias=False,
    )


FAMILY = Family.of_transformers(NAME, "Qwen2ForCausalLM", read)
