"""Weights rounded to 8 or 4 bits in blocks of columns: the layout of `edge::LinearBits`."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """packed u8 [..., block·bits/8] → centred quants i8 [..., block].

    Unsigned with zero point 2^(bits-1); of 4-bit pairs the even column is the low nibble.
    """
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (packed.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def dequantize_bits(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """packed u8 [N, K/block, block·bits/8] and scales [N, K/block] → fp32 [N, K]."""
    return (unpack_bits(packed, bits).float() * scales[..., None]).flatten(-2)
