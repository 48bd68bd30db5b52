"""SmoothQuant: moving the range of an activation's channels into the weight that reads them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
# Smoothing a channel by more than this either way leaves nothing of it in int8.
_LARGEST = np.float32(1e5)
# Taken for the largest weight of a column that has none, as SmoothQuant's code does: nothing reads
# the channel, and it must not set the scale of those that are read.
_UNREAD = 1e-5


def column_absmax(*weights: F32) -> F32:
    """Largest magnitude of each column of matrices [N, K] that read the same input → [K]."""
    return np.max([np.abs(weight).max(axis=0) for weight in weights], axis=0).astype(np.float32)


def smoothing(x_absmax: F32, w_absmax: F32, alpha: float = 0.5) -> F32:
    """Divisors of the activation's channels, s [K] (SmoothQuant, arXiv 2211.10438, equation 4).

    s_j = max|X_j|^alpha / max|W_j|^(1-alpha). With X/s and W·s the product is the same, and alpha
    says how much of the difficulty goes into the weight. A channel that never was active keeps
    s = 1, one that no weight reads is made small, and s stays within 1e-5 and 1e5.

    x_absmax, w_absmax: f32 [K], of the calibrated activation and of the weight's columns.

    Raises ExportError for lengths that differ, values that are not finite or below zero, and an
    alpha outside 0 to 1.
    """
    if x_absmax.shape != w_absmax.shape or x_absmax.ndim != 1:
        raise ExportError(
            f"{x_absmax.shape} activation and {w_absmax.shape} weight maxima do not pair up"
        )
    if not 0 <= alpha <= 1:
        raise ExportError(
            f"{alpha} is not between 0 and 1", field="alpha", remedy="0.5 suits most models"
        )
    x, w = x_absmax.astype(np.float64), w_absmax.astype(np.float64)
    for name, values in (("activation", x), ("weight", w)):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ExportError(f"a channel maximum of the {name} is negative or not finite")
    s = np.ones_like(x)
    np.divide(x**alpha, np.maximum(w, _UNREAD) ** (1 - alpha), out=s, where=x > 0)
    clipped: F32 = np.clip(s, 1 / _LARGEST, _LARGEST).astype(np.float32)
    return clipped
