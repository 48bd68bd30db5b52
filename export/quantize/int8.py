"""Rounding a weight to signed int8: symmetric, half to even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]


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
