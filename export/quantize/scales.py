"""Per-channel scales: SmoothQuant's divisors, Quamba2's groups of heads, channels and states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
# A channel multiplied or divided by more than this would vanish in int8.
_MAX_DIVISOR = np.float32(1e5)
# Stands in for the largest weight of an all-zero column, as in SmoothQuant's code: nothing reads
# the channel, so it must not set the scale of channels that are read.
_UNREAD = 1e-5
_GROUPS = 4  # maximum groups of heads, and of channels in a group of heads (Quamba2)


def partition(maxima: F32, groups: int) -> I64:
    """Group values so that scaling each by its group's maximum adds the least rounding noise.

    A scale is proportional to its group's largest value, and noise power to the scale squared. So
    the groups minimize the sum over all values of (largest of its group)². Optimal groups are runs
    of the sorted values, so a small dynamic program finds them, exact and deterministic.

    maxima: f32 [n], not negative. Returns labels [n] that count from 0 and rise with the values;
    at most `groups` distinct ones.
    """
    count = len(maxima)
    order = np.argsort(maxima, kind="stable")
    power = np.square(maxima[order].astype(np.float64))
    # cost[i]: minimum for the first i values with the groups allowed so far
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
    distinct, ranks = np.unique(labels, return_inverse=True)
    del distinct
    return ranks.reshape(count).astype(np.int64)


def head_channel_scales(absmax: F32, heads: int, ssd_groups: int) -> F32:
    """Return the scales of Mamba-2's scan input x, one per channel (Quamba2, section 4.2).

    The heads of an SSD group form at most four groups by their largest channel, and the channels of
    a group of heads form at most four; the channels of a group share the scale max/127. Quamba2
    groups heads by Ward's method and channels by k-means, and stores them in that order so that a
    kernel finds 16 scales by position. Kernels here read a scale per channel, so the order stays,
    and `partition` does the grouping.

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
    """Return the scales of Mamba-2's B or C, shared by an SSD group: f32 [G·N] → f32 [G·N]."""
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
    """Return divisors s [K] of the activation's channels (SmoothQuant, arXiv 2211.10438, eq. 4).

    s_j = max|X_j|^alpha / max|W_j|^(1-alpha). X/s times W·s is the same product, and alpha sets how
    much of the difficulty moves into the weight. A channel that was never active keeps s = 1, a
    channel that no weight reads is made small, and s stays between 1e-5 and 1e5.

    x_absmax, w_absmax: f32 [K], of the calibrated activation and of the weight's columns.

    Raises ExportError for lengths that differ, values that are negative or not finite, and an alpha
    outside 0 to 1.
    """
    if x_absmax.shape != w_absmax.shape or x_absmax.ndim != 1:
        raise ExportError(
            f"{x_absmax.shape} activation maxima do not match {w_absmax.shape} weight maxima"
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
    clipped: F32 = np.clip(s, 1 / _MAX_DIVISOR, _MAX_DIVISOR).astype(np.float32)
    return clipped
