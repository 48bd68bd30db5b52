"""Embedding lookups, as fp32."""

from __future__ import annotations

from torch import Tensor

from edge.plugins.linear.reference import dequantize_bits
from edge.plugins.quantize.reference import dequantize


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Look up tokens [...] in table [V, D] → f32 [..., D]."""
    return table[tokens].float()


def embed_int8(tokens: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    """Look up tokens [...] in table i8 [V, D] with scale [1|V] → f32 [..., D]."""
    return dequantize(table[tokens], scale.expand(len(table))[tokens].unsqueeze(-1))


def embed_bits(tokens: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Look up tokens [...] in packed and scales as in `dequantize_bits` → f32 [..., K]."""
    return dequantize_bits(packed[tokens], scales[tokens], bits)
