"""Statistics of repetitions: percentiles, mean and deviation, ratios with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

# two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_Z95 = 1.959964


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of `values` lie, interpolated linearly.

    This is numpy's default (Hyndman & Fan's type 7). `values` must not be empty.
    """
    return float(np.quantile(np.asarray(values, np.float64), share))


@dataclass(frozen=True)
class Spread:
    """Summary of repeated measurements, in their unit.

    Attributes:
        deviation: sample standard deviation; None for a single measurement.
    """

    mean: float
    deviation: float | None
    p50: float
    p90: float
    p99: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Summarize measurements; None without any."""
    if not values:
        return None
    p50, p90, p99 = (percentile(values, share) for share in (0.5, 0.9, 0.99))
    deviation = stdev(values) if len(values) > 1 else None
    return Spread(mean(values), deviation, p50, p90, p99, len(values))


@dataclass(frozen=True)
class Ratio:
    """A ratio with its 95 % confidence interval, which is None with fewer than two pairs."""

    value: float
    low: float | None
    high: float | None
    pairs: int


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return ours ÷ theirs, the geometric mean of the ratios within each pair.

    A pair is measured back to back, so that a common slowdown cancels out. Logarithms of ratios are
    averaged (3 and 1/3 are equally far from 1), with Student's t interval. Both sequences must be
    positive, non-empty and of the same length.
    """
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    centre = mean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(centre), None, None, len(logs))
    half = student_t95(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(centre), math.exp(centre - half), math.exp(centre + half), len(logs))


def student_t95(freedom: int) -> float:
    """Return the half-width of a 95 % interval in standard errors, by degrees of freedom.

    Beyond the table, uses the Cornish-Fisher expansion (Abramowitz & Stegun 26.7.5, two terms).
    """
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
