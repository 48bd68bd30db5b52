"""Products with a weight. Of int8 activations and int8 or int4 weights the sums are exact integers.

Weights of 8 or 4 bits are rounded in blocks of columns that share a scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import quantize

# 1024 products of two int8 values sum to at most 2^24, up to which fp32 holds every integer.
_EXACT_COLUMNS = 1024


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I] · weightᵀ [O, I], in fp32."""
    return F.linear(x, weight.float())


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


def linear_bits(x: Tensor, packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """x · dequantize_bits(…)ᵀ."""
    return linear(x, dequantize_bits(packed, scales, bits))


def dequantize_minimum(packed: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """packed u8 [N, K/block, block/2], scales and minimums [N, K/block] → fp32 [N, K]."""
    quants = unpack_bits(packed, 4).float() + 8
    return (quants * scales.float()[..., None] + minimums.float()[..., None]).flatten(-2)


def linear_bits_minimum(x: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """x · dequantize_minimum(…)ᵀ."""
    return linear(x, dequantize_minimum(packed, scales, minimums))


def linear_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """(Σ_k x · weight) · (x_scale · weight_scale).

    x i8 [..., K]; x_scale [1], or [..., 1] for one a row; weight i8 [N, K]; weight_scale [1|N].
    Returns f32 [..., N].
    """
    return _sums(x, weight).float() * (x_scale * weight_scale)


linear_int8_rows = linear_int8


def linear_int8_quantize(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, y_scale: Tensor
) -> Tensor:
    """linear_int8, rounded by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int8(x, x_scale, weight, weight_scale), y_scale)


def linear_int4(x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """x_scale · Σ_b scales[:, b] · (Σ_{k in block b} x · (unpacked - 8)).

    x i8 [..., K]; x_scale [1]; packed u8 [N, K/block, block/2], even columns in the low nibble;
    scales f32 [N, K/block], of either sign. Returns f32 [..., N].
    """
    weight = unpack_bits(packed, 4)
    blocks = x.unflatten(-1, weight.shape[1:])
    total = sum(
        _sums(blocks[..., b, :], weight[:, b]) * scales[:, b].double()
        for b in range(weight.shape[1])
    )
    assert isinstance(total, Tensor)
    return total.float() * x_scale


def linear_int4_quantize(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, y_scale: Tensor
) -> Tensor:
    """linear_int4, rounded by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int4(x, x_scale, packed, scales), y_scale)


def linear_int4_minimum(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor
) -> Tensor:
    """x_scale · Σ_b (scales[:, b] · Σ x · unpacked + minimums[:, b] · Σ x), sums over block b.

    As linear_int4, but quants count from 0, which stands for the block's minimum.
    """
    scales, minimums = scales.float(), minimums.float()
    of_x = x.unflatten(-1, (scales.shape[1], -1)).double().sum(-1)
    rest = of_x @ (minimums.double() + 8 * scales.double()).T
    return linear_int4(x, x_scale, packed, scales) + rest.float() * x_scale


def linear_int4_minimum_quantize(
    x: Tensor, x_scale: Tensor, packed: Tensor, scales: Tensor, minimums: Tensor, y_scale: Tensor
) -> Tensor:
    """linear_int4_minimum, rounded by y_scale [1|N] → i8 [..., N]."""
    return quantize(linear_int4_minimum(x, x_scale, packed, scales, minimums), y_scale)


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_k x[..., k] · weight[n, k], exact, as f64 [..., N]."""
    parts = zip(x.split(_EXACT_COLUMNS, -1), weight.split(_EXACT_COLUMNS, -1), strict=True)
    total = sum((a.float() @ b.float().T).double() for a, b in parts)
    assert isinstance(total, Tensor)
    return total
