"""Qwen3: Llama's blocks, with an RMSNorm on every head of q and k before RoPE.

Source: transformers 5.23 models/qwen3, `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama, qwen2
from edge.export.checkpoint.family import Family, known_only, positions, used_windows
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen3"
_OWN = qwen2.OWN | {"attention_bias", "head_dim"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    context = positions(fields, 32768)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=32,
        context=context,
        windows=used_windows(fields, context),
        qk_norm=True,
        size=128,
    )


FAMILY = Family.of_transformers(NAME, "Qwen3ForCausalLM", read)
