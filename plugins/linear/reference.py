"""Products with a weight. Sums of int8 activations by int8 or int4 weights are exact integers.

Weights of 8 or 4 bits are quantized in blocks of columns that share a scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import quantize

# 1024 products of two int8 values sum to at most 2^24; fp32 represents all integers up to that.
_EXACT_COLUMNS = 1024


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ in fp32. x [..., I], weight [O, I]."""
    return F.linear(x, weight.float())


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Unpack packed u8 [..., block·bits/8] → centred quants i8 [..., block].

    Packed quants are unsigned with zero point 2^(bits-1). With 4 bits, even columns are in the low
    nibble.
    """
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return (packed.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def dequantize_bits(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Dequantize packed u8 [N, K/block, block·bits/8] with scales [N, K/block] → fp32 [N, K]."""
    return (unpack_bits(packed, bits).float() * scales[..., None]).flatten(-2)


def linear_bits(x: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return x · dequantize_bits(…)ᵀ."""
    return linear(x, dequantize_bits(packed, scales, bits))


def dequantize_minimum(packed: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Dequantize packed u8 [N, K/block, block/2], scales, minimums [N, K/block] → fp32 [N, K]."""
    quants = unpack_bits(packed, 4).float() + 8
    return (quants * scales.float()[..., None] + minimums.float()[..., None]).flatten(-2)


def linear_bits_minimum(x: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """Return x · dequantize_minimum(…)ᵀ."""
    return linear(x, dequantize_minimum(packed, scales, minimums))


def linear_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return (Σ_k x · weight) · (x_scale · weight_scale).

    x i8 [..., K]; x_scale [1], or [..., 1] for one per row; weight i8 [N, K]; weight_scale [1|N].
    Returns f32 [..., N].
    """
    return _exact_product(x, weight).float() * (x_scale * weight_scale)


linear_int8_rows = linear_int8


def linear_int8_quantize(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, y_scale: Tensor
) -> Tensor:
    """Return linear_int8 quantized by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int8(x, x_scale, weight, weight_scale), y_scale)


def linear_int4(x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Return x_scale · Σ_b scales[:, b] · (Σ_{k in block b} x · (unpacked - 8)).

    x i8 [..., K]; x_scale [1]; packed u8 [N, K/block, block/2], even columns in the low nibble;
    scales f32 [N, K/block], of either sign. Returns f32 [..., N].
    """
    weight = unpack_bits(packed, 4)
    blocks = x.unflatten(-1, weight.shape[1:])
    total = sum(
        _exact_product(blocks[..., b, :], weight[:, b]) * scales[:, b].double()
        for b in range(weight.shape[1])
    )
    assert isinstance(total, Tensor)
    return total.float() * x_scale


def linear_int4_quantize(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, y_scale: Tensor
) -> Tensor:
    """Return linear_int4 quantized by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int4(x, x_scale, packed, scales), y_scale)


def linear_int4_minimum(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor
) -> Tensor:
    """Return x_scale · Σ_b (scales[:, b] · Σ x · unpacked + minimums[:, b] · Σ x).

    The inner sums are over block b. As linear_int4, but quant 0 represents the block's minimum.
    """
    scales, minimums = scales.float(), minimums.float()
    block_sums = x.unflatten(-1, (scales.shape[1], -1)).double().sum(-1)
    offset = block_sums @ (minimums.double() + 8 * scales.double()).T
    return linear_int4(x, x_scale, packed, scales) + offset.float() * x_scale


def linear_int4_minimum_quantize(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor, y_scale: Tensor
) -> Tensor:
    """Return linear_int4_minimum quantized by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int4_minimum(x, x_scale, packed, scales, minimums), y_scale)


def _exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return Σ_k x[..., k] · weight[n, k], exact, as f64 [..., N]."""
    parts = zip(x.split(_EXACT_COLUMNS, -1), weight.split(_EXACT_COLUMNS, -1), strict=True)
    total = sum((a.float() @ b.float().T).double() for a, b in parts)
    assert isinstance(total, Tensor)
    return total
