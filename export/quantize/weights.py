"""Quantize weights and back: to signed int8, or to 8 or 4 bits in blocks of columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
# Stored in fp16, or in fp32 where fp16 is too coarse.
Scales = NDArray[np.float16] | NDArray[np.float32]
U8 = NDArray[np.uint8]
I8 = NDArray[np.int8]

# Elements quantized at a time: bounds the temporaries, whatever the tensor's size.
SLAB_ELEMENTS = 1 << 22
# Shrinking the 4-bit grid a little clips the largest value but fits the others better.
_SHRINKS_4 = (1.0, 0.94, 0.88, 0.82)
# For blocks with a minimum: steps from the smallest value to the largest. More than 15 clip both.
_STEPS_4 = (15, 16, 17, 18)
# Columns per block of llama.cpp's types of 4 and 8 bits.
GRID_BLOCK = 32
# Steps to try for a block already on a grid of 16 values, and rows sampled to detect such grids.
_STEPS_ON_GRID, _SAMPLED_ROWS = tuple(range(15, 7, -1)), 64
# Rows with this many elements at a time stay in a processor's cache.
_CACHED_ELEMENTS = 1 << 18


def quantize_blocks(weight: F32, bits: int, block: int) -> tuple[U8, F32]:
    """Quantize weight [N, K] to packed [N, K/block, block·bits/8] and scales [N, K/block].

    The layout is that of `edge::LinearBits` (com.microsoft.MatMulNBits): unsigned with zero point
    2^(bits-1). With 8 bits, scale = absmax/127, rounded half to even. With 4 bits, the value of
    largest magnitude maps to -8, which makes scales signed (llama.cpp's Q4_0), and the grid is
    shrunk by the one of a few factors that gives the least squared error.

    Raises ExportError for a value that is not finite or a K that `block` does not divide.
    """
    rows, columns = weight.shape
    if columns % block:
        raise ExportError(f"blocks of {block} do not divide {columns} columns")
    packed = np.empty((rows, columns // block, block * bits // 8), np.uint8)
    scales = np.empty((rows, columns // block), np.float32)
    slab = max(1, SLAB_ELEMENTS // columns)
    for start in range(0, rows, slab):
        stop = min(rows, start + slab)
        blocks = weight[start:stop].astype(np.float32, copy=False).reshape(stop - start, -1, block)
        if not np.isfinite(blocks).all():
            raise ExportError("a weight is NaN or infinite")
        quantize = _quantize_8 if bits == 8 else _quantize_4
        packed[start:stop], scales[start:stop] = quantize(blocks)
    return packed, scales


def inverse(scale: F32) -> F32:
    """Return 1/scale, or 0 where the block is all zeros."""
    result = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=result, where=np.abs(scale) > np.finfo(np.float32).tiny)
    return result


def _quantize_8(blocks: F32) -> tuple[U8, F32]:
    scale = np.abs(blocks).max(-1) / np.float32(127)
    quants = np.rint(blocks * inverse(scale)[..., None])
    return (np.clip(quants, -127, 127) + 128).astype(np.uint8), scale


def _quantize_4(blocks: F32) -> tuple[U8, F32]:
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


def quantize_minimum(
    weight: F32, block: int, importance: F32 | None = None
) -> tuple[U8, Scales, Scales]:
    """Quantize weight [N, K] to 4 bits: packed [N, K/block, block/2], scales and minimums
    [N, K/block].

    The layout is that of `edge::LinearBitsMinimum`: w = q · scale + minimum. A weight whose blocks
    are already on such a grid, as in a Q4_0 or Q4_1 file, is kept exactly. Otherwise the grid with
    the least squared error of a few widths is used, each refitted to its codes by least squares, as
    llama.cpp's k-quants do. importance [K] weights the error of each column.

    Raises ExportError as `quantize_blocks` does.
    """
    rows, columns = weight.shape
    if columns % block:
        raise ExportError(f"blocks of {block} do not divide {columns} columns")
    if not np.isfinite(weight).all():
        raise ExportError("a weight is NaN or infinite")
    blocks = weight.astype(np.float32, copy=False).reshape(rows, -1, block)
    column_weights = np.ones(columns, np.float32) if importance is None else importance
    column_weights = column_weights.reshape(1, -1, block)
    sample = blocks[:: max(1, rows // _SAMPLED_ROWS)]
    dtype = _scale_type(sample)
    on_grid = _fits_grid(sample, dtype)
    packed = np.empty((rows, columns // block, block // 2), np.uint8)
    scales, minimums = (np.empty(packed.shape[:2], dtype) for _ in range(2))
    slab = max(1, _CACHED_ELEMENTS // columns)
    for start in range(0, rows, slab):
        part = slice(start, start + slab)
        quants, scales[part], minimums[part], _ = _search_grids(
            blocks[part], column_weights, on_grid, dtype
        )
        packed[part] = quants[..., 0::2] | (quants[..., 1::2] << np.uint8(4))
    return packed, scales, minimums


def _scale_type(blocks: F32) -> type[np.float16] | type[np.float32]:
    """Return fp16 if its range and its smallest normal number suit the scales, else fp32."""
    mean = np.ptp(blocks, axis=-1).mean() / 15 if blocks.size else 0.0
    fits = np.abs(blocks).max(initial=0) < np.finfo(np.float16).max
    return np.float16 if fits and mean >= np.finfo(np.float16).tiny else np.float32


def on_a_grid(weight: F32) -> bool:
    """Return whether blocks of GRID_BLOCK columns, which must divide K, are on 4-bit grids."""
    sample = weight[:: max(1, len(weight) // _SAMPLED_ROWS)].reshape(-1, GRID_BLOCK)
    return _fits_grid(sample, _scale_type(sample))


def on_an_8_bit_grid(weight: F32) -> bool:
    """Return whether blocks of GRID_BLOCK columns, which must divide K, are those of a Q8_0 file,
    so that `quantize_blocks` keeps them.
    """
    sample = weight[:: max(1, len(weight) // _SAMPLED_ROWS)]
    packed, scales = quantize_blocks(sample, 8, GRID_BLOCK)
    error = np.square(dequantize_blocks(packed, scales, 8) - sample).sum()
    return bool(error <= 1e-4 * GRID_BLOCK * np.square(scales).sum())


def _fits_grid(blocks: F32, dtype: type) -> bool:
    _, scales, _, error = _search_grids(blocks, np.ones(1, np.float32), True, dtype)
    return bool(error.sum() <= 1e-4 * blocks.shape[-1] * np.square(scales.astype(np.float32)).sum())


def _search_grids(
    blocks: F32, column_weights: F32, on_grid: bool, dtype: type
) -> tuple[U8, Scales, Scales, F32]:
    """Return quants, scales, minimums and error of the best grid tried. `on_grid` says that the
    blocks are already on one."""
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    best: list[F32] = []
    for steps in _STEPS_ON_GRID if on_grid else _STEPS_4:
        scale = (high - low) / np.float32(steps)
        minimum = low if steps <= 15 else (low + high) / 2 - np.float32(7.5) * scale
        candidate = _quantize_to_grid(blocks, column_weights, scale, minimum, dtype)
        best = _keep_better(candidate, best)
        if not on_grid:
            refitted = _refit(blocks, column_weights, candidate[0], scale, minimum)
            best = _keep_better(_quantize_to_grid(blocks, column_weights, *refitted, dtype), best)
    quants, scale, minimum, error = best
    return (
        quants.astype(np.uint8), scale[..., 0].astype(dtype), minimum[..., 0].astype(dtype),
        error[..., 0],
    )  # fmt: skip


def _quantize_to_grid(
    blocks: F32, column_weights: F32, scale: F32, minimum: F32, dtype: type
) -> list[F32]:
    """Return quants, the scale and the minimum as stored, and the error."""
    scale, minimum = (x.astype(dtype).astype(np.float32) for x in (scale, minimum))
    quants = np.clip(np.rint((blocks - minimum) * inverse(scale)), 0, 15)
    error = (np.square(quants * scale + minimum - blocks) * column_weights).sum(-1, keepdims=True)
    return [quants, scale, minimum, error]


def _keep_better(candidate: list[F32], best: list[F32]) -> list[F32]:
    if not best:
        return candidate
    improved = candidate[-1] < best[-1]
    return [np.where(improved, new, old) for new, old in zip(candidate, best, strict=True)]


def _refit(
    blocks: F32, column_weights: F32, quants: F32, scale: F32, minimum: F32
) -> tuple[F32, F32]:
    """Return the scale and the minimum with the least squared error for these quants."""
    weighted = quants * column_weights
    n, q = column_weights.sum(-1, keepdims=True), weighted.sum(-1, keepdims=True)
    x, qq, qx = ((a * b).sum(-1, keepdims=True) for a, b in (
        (blocks, column_weights), (weighted, quants), (weighted, blocks)
    ))  # fmt: skip
    spread = n * qq - q * q
    solvable = spread > 1e-6 * n * qq  # else all quants are the same
    spread = np.where(solvable, spread, 1)
    return (
        np.where(solvable, (n * qx - q * x) / spread, scale),
        np.where(solvable, (qq * x - q * qx) / spread, minimum),
    )


def dequantize_blocks(packed: U8, scales: Scales, bits: int, minimums: Scales | None = None) -> F32:
    """Return weight [N, K]: the inverse of `quantize_blocks`, or of `quantize_minimum`."""
    if bits == 4:
        packed = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(
            *packed.shape[:-1], -1
        )
    scales = scales.astype(np.float32)
    if minimums is not None:
        values = packed * scales[..., None] + minimums.astype(np.float32)[..., None]
        return values.reshape(packed.shape[0], -1)
    centred = packed.astype(np.float32) - np.float32(1 << (bits - 1))
    return (centred * scales[..., None]).reshape(packed.shape[0], -1)


def quantize_int8(array: F32, rows: bool = False) -> tuple[I8, F32]:
    """Quantize array [N, …] to int8 of the same shape, and scales [1] or, with `rows`, [N].

    A scale is absmax / 127, or 1 if all values are zero. Raises ExportError for a value that is not
    finite.
    """
    axes = tuple(range(1, array.ndim)) if rows else None
    largest = np.abs(array).max(axes, initial=0)
    if not np.isfinite(largest).all():
        raise ExportError("a weight is NaN or infinite")
    scale = np.asarray(largest, np.float32).reshape(-1) / np.float32(127)
    # Dividing by a smaller scale would overflow fp32, so such a weight is treated as zero.
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    column = scale.reshape(-1, *[1] * (array.ndim - 1)) if rows else scale
    return round_int8(array, column), scale.astype(np.float32)


def round_int8(array: F32, scale: F32) -> I8:
    """Return array / scale, rounded half to even and clipped to int8; `scale` is broadcast."""
    quotient: NDArray[Any] = np.rint(array / scale)
    return np.clip(quotient, -128, 127).astype(np.int8)


def dequantize_int8(quants: I8, scale: F32, rows: bool = False) -> F32:
    """Invert `quantize_int8`."""
    column = scale.reshape(-1, *[1] * (quants.ndim - 1)) if rows else scale
    return quants.astype(np.float32) * column
