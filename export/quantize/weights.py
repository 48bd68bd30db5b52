"""Rounding weights, and back: to signed int8, or to 8 or 4 bits in blocks of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

# Rows quantized at a time: bounds the temporaries, whatever the tensor's size.
_SLAB_ELEMENTS = 1 << 22
# Shrinking the 4-bit grid a little clips the largest value and serves the others better.
_SHRINKS_4 = (1.0, 0.94, 0.88, 0.82)


def quantize_blocks(weight: F32, bits: int, block: int) -> tuple[U8, F32]:
    """weight [N, K] → packed [N, K/block, block·bits/8] and scales [N, K/block].

    The layout is that of `edge::LinearBits` (com.microsoft.MatMulNBits): unsigned with zero point
    2^(bits-1). 8 bits: scale = absmax/127, half to even. 4 bits: the value of largest magnitude
    sits at -8, which makes scales signed (llama.cpp's Q4_0), and the grid is shrunk by whichever of
    a few factors has the least squared error.

    Raises ExportError for a value that is not finite or a K that blocks do not divide.
    """
    rows, columns = weight.shape
    if columns % block:
        raise ExportError(f"blocks of {block} do not divide {columns} columns")
    packed = np.empty((rows, columns // block, block * bits // 8), np.uint8)
    scales = np.empty((rows, columns // block), np.float32)
    slab = max(1, _SLAB_ELEMENTS // columns)
    for start in range(0, rows, slab):
        stop = min(rows, start + slab)
        blocks = weight[start:stop].astype(np.float32, copy=False).reshape(stop - start, -1, block)
        if not np.isfinite(blocks).all():
            raise ExportError("a weight is NaN or infinite")
        quantize = _eight if bits == 8 else _four
        packed[start:stop], scales[start:stop] = quantize(blocks)
    return packed, scales


def inverse(scale: F32) -> F32:
    """1/scale, and 0 where the block is all zeros."""
    result = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=result, where=np.abs(scale) > np.finfo(np.float32).tiny)
    return result


def _eight(blocks: F32) -> tuple[U8, F32]:
    scale = np.abs(blocks).max(-1) / np.float32(127)
    quants = np.rint(blocks * inverse(scale)[..., None])
    return (np.clip(quants, -127, 127) + 128).astype(np.uint8), scale


def _four(blocks: F32) -> tuple[U8, F32]:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)[..., 0]
    best_error = np.full(largest.shape, np.inf, np.float32)
    best_scale = np.zeros_like(largest)
    best = np.zeros(blocks.shape, np.uint8)
    for shrink in _SHRINKS_4:
        scale = (largest * np.float32(shrink / -8)).astype(np.float32)
        quants = np.clip(np.rint(blocks * inverse(scale)[..., None]), -8, 7)
        error = np.square(quants * scale[..., None] - blocks).sum(-1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best = np.where(better[..., None], (quants + 8).astype(np.uint8), best)
    return best[..., 0::2] | (best[..., 1::2] << np.uint8(4)), best_scale


def dequantize_blocks(packed: U8, scales: F32, bits: int) -> F32:
    """The inverse: packed and scales → weight [N, K]."""
    if bits == 4:
        packed = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(
            *packed.shape[:-1], -1
        )
    centred = packed.astype(np.float32) - np.float32(1 << (bits - 1))
    return (centred * scales[..., None]).reshape(packed.shape[0], -1)


def quantize_int8(array: F32, rows: bool = False) -> tuple[I8, F32]:
    """array [N, …] → int8 of its shape and scales [1], or [N] with `rows`: absmax / 127.

    What is all zeros has scale 1. Raises ExportError for a value that is not finite.
    """
    axes = tuple(range(1, array.ndim)) if rows else None
    largest = np.abs(array).max(axes, initial=0)
    if not np.isfinite(largest).all():
        raise ExportError("a weight is NaN or infinite")
    scale = np.asarray(largest, np.float32).reshape(-1) / np.float32(127)
    # Below this an fp32 quotient by the scale would overflow; such a weight is zero.
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    column = scale.reshape(-1, *[1] * (array.ndim - 1)) if rows else scale
    return round_int8(array, column), scale.astype(np.float32)


def round_int8(array: F32, scale: F32) -> I8:
    """clip(half to even(array / scale), -128, 127); `scale` is broadcast."""
    quotient: NDArray[Any] = np.rint(array / scale)
    return np.clip(quotient, -128, 127).astype(np.int8)


def dequantize_int8(quants: I8, scale: F32, rows: bool = False) -> F32:
    """The inverse of `quantize_int8`."""
    column = scale.reshape(-1, *[1] * (quants.ndim - 1)) if rows else scale
    return quants.astype(np.float32) * column
