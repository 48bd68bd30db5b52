"""Scales a channel: SmoothQuant's divisors, and Quamba2's groups of heads, channels and states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
# Smoothing a channel by more than this either way leaves nothing of it in int8.
_LARGEST = np.float32(1e5)
# Taken for the largest weight of a column that has none, as SmoothQuant's code does: nothing reads
# the channel, and it must not set the scale of those that are read.
_UNREAD = 1e-5
_GROUPS = 4  # of heads, and of channels of a group of heads (Quamba2)


def partition(maxima: F32, groups: int) -> I64:
    """Group of each value, so that rounding every value by its group's maximum hurts least.

    A scale is proportional to its group's largest value and its noise power to the scale squared,
    so the sum over all values of (largest of its group)² is made least. Only runs of the sorted
    values can be best, which leaves a small dynamic programme: exact, and the same every time.

    maxima: f32 [n], not negative. Returns labels [n] from 0, rising with the values; there are at
    most `groups` of them.
    """
    count = len(maxima)
    order = np.argsort(maxima, kind="stable")
    power = np.square(maxima[order].astype(np.float64))
    # cost[i]: the least for the first i values with the groups allowed so far
    cost = np.concatenate([[0.0], np.arange(1, count + 1) * power])
    starts = []
    for _ in range(min(groups, count) - 1):
        better, start = cost.copy(), np.zeros(count + 1, np.int64)
        for i in range(1, count + 1):
            # the last group is values first..i-1
            with_last = cost[:i] + (i - np.arange(i)) * power[i - 1]
            start[i] = int(with_last.argmin())
            better[i] = with_last[start[i]]
        cost = better
        starts.append(start)
    labels = np.zeros(count, np.int64)
    end = count
    for number, start in enumerate(reversed(starts)):
        labels[order[start[end] : end]] = len(starts) - number
        end = int(start[end])
    found, ranks = np.unique(labels, return_inverse=True)
    del found
    return ranks.reshape(count).astype(np.int64)


def head_channel_scales(absmax: F32, heads: int, ssd_groups: int) -> F32:
    """Scales of Mamba-2's scan input x, one a channel (Quamba2, section 4.2).

    Each SSD group's heads form at most four groups by their largest channel, and the
    channels of a group of heads form at most four; a group's channels share the scale
    max/127. Quamba2 groups heads by Ward's method and channels by k-means and stores them in that
    order, so that a kernel finds 16 scales by position. Kernels here read a scale a channel: the
    order stays, and the grouping is the one of `partition`.

    absmax: f32 [H·P], the calibrated largest magnitude of each channel. Returns f32 [H·P]; a group
    that was never active has scale 1.
    """
    per_head = _rows(absmax, heads, "heads").astype(np.float32)
    scales = np.empty_like(per_head)
    for group in _rows(np.arange(heads), ssd_groups, "SSD groups"):
        by_head = partition(per_head[group].max(1), _GROUPS)
        for label in range(int(by_head.max()) + 1):
            chosen = group[by_head == label]
            flat = per_head[chosen].reshape(-1)
            by_channel = partition(flat, _GROUPS)
            largest = np.zeros(int(by_channel.max()) + 1, np.float32)
            np.maximum.at(largest, by_channel, flat)
            scales[chosen] = _scale(largest)[by_channel].reshape(len(chosen), -1)
    return scales.reshape(-1)


def ssd_group_scales(absmax: F32, ssd_groups: int) -> F32:
    """Scales of Mamba-2's B or C, one an SSD group, given out a state: f32 [G·N] → f32 [G·N]."""
    grouped = _rows(absmax, ssd_groups, "SSD groups").astype(np.float32)
    scale = _scale(grouped.max(1))
    return np.repeat(scale, grouped.shape[1])


def _scale(largest: F32) -> F32:
    scale: F32 = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return scale


def _rows(values: NDArray[np.generic], rows: int, what: str) -> NDArray[np.generic]:
    if rows <= 0 or values.size % rows:
        raise ExportError(f"{values.size} channels do not divide into {rows} {what}")
    return values.reshape(rows, -1)


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
