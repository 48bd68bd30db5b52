"""Qwen3: Llama's blocks, with an RMSNorm of every head of q and k before RoPE.

Source: transformers 5.23 models/qwen3, `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama, qwen2
from edge.export.checkpoint.family import Family, context_of, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen3"
_OWN = qwen2.OWN | {"attention_bias", "head_dim"}


def read(fields: Fields) -> Layout:
    known_only(fields, _OWN)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=32,
        context=context_of(fields, 32768),
        qk_norm=True,
        size=128,
    )


FAMILY = Family.of_transformers(NAME, "Qwen3ForCausalLM", read)
