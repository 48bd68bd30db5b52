"""Calibration statistics of a value, and the scales derived from them.

Only counts and maxima, so that the order and grouping of observations do not matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.errors import ExportError

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# Bins are the 15 bits of |x| below the sign, a truncated bfloat16. From _FINITE on: inf and NaN.
_BINS, _FINITE = 1 << 15, 0x7F80
_BIN_EDGES = (np.arange(_FINITE + 1, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
_INT8_MAX = 127
# OCTAV stops when a step changes less than this share; bisection alone gets there in 30 steps.
_CONVERGED, _MAX_STEPS = 1e-9, 100


class Statistics:
    """Histogram and channel maxima of one value.

    Attributes:
        name: name of the value in the graph.
        counts: i64 [32640], number of |x| in each bin: the top 15 bits of |x| in fp32 (8 of
            exponent, 7 of mantissa), so a bin is less than 1 % wide.
        channel_absmax: largest |x| per channel, along the last axis or `axes`.
    """

    def __init__(self, name: str, axes: tuple[int, ...] = (-1,)) -> None:
        """Start empty; `channel_absmax` keeps `axes` and reduces the others."""
        self.name = name
        self.counts: I64 = np.zeros(_FINITE, np.int64)
        self.channel_absmax: F32 = np.zeros(0, np.float32)
        self._axes = axes

    def observe(self, x: Tensor) -> None:
        """Add the values of x, fp32 of any shape that has `axes`.

        Raises ExportError naming the value when an element is NaN or infinite.
        """
        magnitude = x.float().abs()
        bins = (magnitude.contiguous().view(torch.int32) >> 16).flatten()
        counts = torch.bincount(bins, minlength=_BINS).numpy()
        _require_finite(self.name, int(counts[_FINITE:].sum()), x.numel())
        axes = sorted(axis % x.dim() for axis in self._axes)
        others = [axis for axis in range(x.dim()) if axis not in axes]
        observed = Statistics(self.name, self._axes)
        observed.counts = counts[:_FINITE]
        observed.channel_absmax = (magnitude.amax(others) if others else magnitude).numpy()
        self.merge(observed)

    def merge(self, other: Statistics) -> None:
        """Add another's statistics of the same value. The order of merges does not matter."""
        if not self.channel_absmax.size:
            self.channel_absmax = other.channel_absmax.copy()
        elif other.channel_absmax.size:
            self.channel_absmax = np.maximum(self.channel_absmax, other.channel_absmax)
        self.counts = self.counts + other.counts

    @property
    def count(self) -> int:
        """Number of elements seen."""
        return int(self.counts.sum())

    @property
    def absmax(self) -> float:
        """The largest |x|, or 0 when nothing was seen."""
        return float(self.channel_absmax.max(initial=0))

    def percentile(self, p: float) -> float:
        """Return the |x| that p % of elements do not exceed (Quamba, arXiv 2410.13229, sec. 4.2).

        Assumes that elements are spread evenly within a bin. p = 100 gives exactly the absmax.
        """
        if not 0 < p <= 100:
            raise ExportError(
                f"{p} is not a percentile", field="percentile", remedy="give one above 0, up to 100"
            )
        if p == 100 or not self.count:
            return self.absmax
        rank = self.count * p / 100
        below = self.counts.cumsum()
        at = int(np.searchsorted(below, rank))
        low, high = self._edges()
        share = (rank - (below[at] - self.counts[at])) / self.counts[at]
        return float(low[at] + share * (high[at] - low[at]))

    def octav(self, bits: int = 8) -> float:
        """Return the clip s of least expected squared error (OCTAV, arXiv 2206.06501, equation 6).

        Runs the paper's recursion, s ← E[|X|·1{|X|>s}] / (c·E[1{|X|≤s}] + E[1{|X|>s}]), until it
        converges. c·s² is the rounding noise, a twelfth of the squared step. The paper's step
        s/2^(B-1) gives c = 4^-B / 3; ours is s/(2^(B-1) - 1), hence c = 1 / (12·(2^(B-1) - 1)²).

        s times the denominator, minus the numerator, rises with s, so there is one fixed point. A
        step that would leave the interval known to hold it bisects the interval instead.
        """
        if not self.absmax:
            return 0.0
        noise = 1 / (12 * (2 ** (bits - 1) - 1) ** 2)
        left, right = 0.0, self.absmax
        s = self.percentile(50)
        for _ in range(_MAX_STEPS):
            beyond, total = self._tail(s)
            next_s = total / (noise * (1 - beyond) + beyond)
            if abs(next_s - s) <= _CONVERGED * s:
                break
            left, right = (s, right) if next_s > s else (left, s)
            s = next_s if left < next_s < right else (left + right) / 2
        return s

    def clipped(self, scale: float) -> float:
        """Return the share of elements that a scale saturates: |x| above 127.5 · scale."""
        return self._tail((_INT8_MAX + 0.5) * scale)[0] if self.count else 0.0

    def _edges(self) -> tuple[F64, F64]:
        """Return where each bin begins and ends; no bin ends above the absmax."""
        return _BIN_EDGES[:-1], np.minimum(_BIN_EDGES[1:], self.absmax)

    def _tail(self, s: float) -> tuple[float, float]:
        """Return E[1{|X|>s}] and E[|X|·1{|X|>s}], elements being spread evenly within bins."""
        filled = np.flatnonzero(self.counts)
        low, high = (edge[filled] for edge in self._edges())
        width = high - low
        above = np.clip(high - s, 0, width)
        share = np.divide(above, width, out=(high > s).astype(np.float64), where=width > 0)
        beyond = self.counts[filled] * share
        total = float((beyond * (high - above / 2)).sum())
        return float(beyond.sum()) / self.count, total / self.count


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration run.

    Attributes:
        values, rotated: value name → statistics of the value, and of its Hadamard rotation.
        text: description of the text: `CalibrationText.record`.
    """

    values: Mapping[str, Statistics]
    rotated: Mapping[str, Statistics] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)

    def statistics(self, value: str, rotated: bool = False) -> Statistics:
        """Return the statistics of a value of the fp32 graph, or of its rotation.

        Raises KeyError if the value was not observed.
        """
        return (self.rotated if rotated else self.values)[value]


def _require_finite(name: str, bad: int, count: int) -> None:
    if bad:
        raise ExportError(
            f"{bad} of {count} values are NaN or infinite during calibration",
            field=name,
            remedy="the model overflows in fp32 on this text: calibrate with another, or check "
            "this layer's weights",
        )


def scale_of(limit: float | F32) -> F32:
    """Return the int8 scale, limit / 127, of values up to `limit`: fp32 [1], or one per channel.

    Where the limit is 0, or so small that fp32 could not divide by the scale, the scale is 1, and
    all values round to 0.
    """
    scale = np.asarray(limit, np.float32).reshape(-1) / np.float32(_INT8_MAX)
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale).astype(np.float32)


@dataclass
class Hessian:
    """Xᵀ·X of a value's rows, f64 [K, K], for GPTQ (arXiv 2210.17323, section 3).

    It is a floating-point sum, whose last bits depend on the order of sequences. Calibration
    therefore fixes that order.
    """

    name: str
    rows: int = 0
    total: F64 | None = None

    def observe(self, x: Tensor) -> None:
        """Add x, fp32 [..., K]. Raises ExportError naming the value if it has NaN or infinity."""
        x64 = x.double().flatten(0, -2)
        _require_finite(self.name, int((~torch.isfinite(x64)).sum()), x.numel())
        product: Any = (x64.T @ x64).numpy()
        self.total = product if self.total is None else self.total + product
        self.rows += x64.shape[0]


@dataclass
class Routes:
    """Counts of the experts that tokens were routed to, from the value `chosen`, i32 [..., k].

    Attributes:
        experts: number of experts, X.
        tokens: i64 [X], number of tokens routed to each expert.
        last: the value observed last.
    """

    experts: int
    tokens: I64 = field(init=False)
    last: Tensor | None = None

    def __post_init__(self) -> None:
        self.tokens = np.zeros(self.experts, np.int64)

    def observe(self, x: Tensor) -> None:
        self.last = x
        self.tokens = self.tokens + torch.bincount(x.flatten(), minlength=self.experts).numpy()


@dataclass
class ExpertHessians:
    """`Hessian` per expert, f64 [X, K, K], of a value with a slot for each chosen expert.

    `routes` must observe where the slots go before this observes the value.
    """

    name: str
    routes: Routes
    total: F64 | None = None

    def observe(self, x: Tensor) -> None:
        """Add x, fp32 [..., k·K]. Raises ExportError naming the value if it is not finite."""
        chosen = self.routes.last
        assert chosen is not None
        _require_finite(self.name, int((~torch.isfinite(x)).sum()), x.numel())
        rows = x.double().unflatten(-1, (chosen.shape[-1], -1))
        if self.total is None:
            self.total = np.zeros((self.routes.experts, rows.shape[-1], rows.shape[-1]))
        for expert in chosen.unique().tolist():
            expert_rows = rows[chosen == expert]
            self.total[expert] += (expert_rows.T @ expert_rows).numpy()
