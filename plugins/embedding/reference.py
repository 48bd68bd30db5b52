"""Rows of a table, as fp32."""

from __future__ import annotations

from torch import Tensor

from edge.plugins.linear.reference import dequantize_bits
from edge.plugins.quantize.reference import dequantize


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens [...], table [V, D] → f32 [..., D]."""
    return table[tokens].float()


def embed_int8(tokens: Tensor, table: Tensor, scale: Tensor) -> Tensor:
    """tokens [...], table i8 [V, D], scale [1|V] → f32 [..., D]."""
    return dequantize(table[tokens], scale.expand(len(table))[tokens].unsqueeze(-1))


def embed_bits(tokens: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """tokens [...], packed and scales as of `dequantize_bits` → f32 [..., K]."""
    return dequantize_bits(packed[tokens], scales[tokens], bits)
