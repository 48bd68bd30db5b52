"""Products of int8 activations with int8 and int4 weights; the sums are exact integers."""

from __future__ import annotations

from torch import Tensor

from edge.plugins.reference.bits import unpack_bits
from edge.plugins.reference.quantize import quantize

# 1024 products of two int8 values sum to at most 2^24, up to which fp32 holds every integer.
_EXACT_COLUMNS = 1024


def linear_int8(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """(Σ_k x · weight) · (x_scale · weight_scale).

    x i8 [..., K]; x_scale [1], or [..., 1] for one a row; weight i8 [N, K]; weight_scale [1|N].
    Returns f32 [..., N].
    """
    return _sums(x, weight).float() * (x_scale * weight_scale)


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


def _sums(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_k x[..., k] · weight[n, k], exact, as f64 [..., N]."""
    parts = zip(x.split(_EXACT_COLUMNS, -1), weight.split(_EXACT_COLUMNS, -1), strict=True)
    total = sum((a.float() @ b.float().T).double() for a, b in parts)
    assert isinstance(total, Tensor)
    return total
