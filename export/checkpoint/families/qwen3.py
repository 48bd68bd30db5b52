"""Qwen3: Llama's blocks, with an RMSNorm of every head of q and k before RoPE.

Source: transformers 5.23 models/qwen3, `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from edge.export.checkpoint.families import llama, qwen2
from edge.export.checkpoint.family import Family, context_of, is_transformers, known_only
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "qwen3"
_OWN = qwen2.OWN | {"attention_bias", "head_dim"}


def claims(fields: Fields) -> bool:
    return is_transformers(fields, NAME, "Qwen3ForCausalLM")


def read(fields: Fields) -> Layout:
    """Config and tensor places; raises CheckpointError for a bad field."""
    known_only(fields, _OWN)
    return llama.read_blocks(
        fields,
        NAME,
        kv_heads=32,
        eps=1e-6,
        context=context_of(fields, 32768),
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        size=128,
    )


FAMILY = Family(NAME, "model_type qwen3", claims, read)
