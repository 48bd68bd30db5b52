"""OLMo 2: Llama's blocks, with norms after attention and MLP, and one over all of q and of k.

Source: transformers 5.23 models/olmo2, `Olmo2ForCausalLM`.
"""

from __future__ import annotations

from typing import Any

from edge.export.checkpoint.families import llama
from edge.export.checkpoint.family import Family, known_only, positions
from edge.export.checkpoint.fields import Fields
from edge.export.checkpoint.layout import Layout

NAME = "olmo2"
BLOCKS: dict[str, Any] = {"eps": 1e-5, "norms": "behind", "qk_norm": True, "qk_whole": True}


def read(fields: Fields) -> Layout:
    known_only(fields, {"attention_bias", "head_dim"})
    return llama.read_blocks(fields, NAME, context=positions(fields, 2048), **BLOCKS)


FAMILY = Family.of_transformers(NAME, "Olmo2ForCausalLM", read)
