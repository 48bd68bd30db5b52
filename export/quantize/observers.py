"""What calibration remembers of one value, and the scales that follow from it.

Counts and maxima only, so that the order and grouping of what was seen leave no trace.
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

# The top 15 bits of |x| as fp32, sign aside: its bfloat16, cut off. From _FINITE on: inf and NaN.
_BINS, _FINITE = 1 << 15, 0x7F80
_LOW = (np.arange(_FINITE + 1, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
_LARGEST = 127
# OCTAV stands still when a step changes less than this share; halving alone gets there in 30 turns.
_STILL, _TURNS = 1e-9, 100


class Statistics:
    """Everything seen of one value.

    Attributes:
        name: of the value in the graph.
        counts: i64 [32640]; how many |x| have these top 15 bits of their fp32 pattern (8 of
            exponent, 7 of mantissa): bins less than 1 % wide.
        channel_absmax: largest |x| of each channel: of the last axis, or of `axes`.
    """

    def __init__(self, name: str, axes: tuple[int, ...] = (-1,)) -> None:
        """`axes`: those that are not reduced by `channel_absmax`."""
        self.name = name
        self.counts: I64 = np.zeros(_FINITE, np.int64)
        self.channel_absmax: F32 = np.zeros(0, np.float32)
        self._axes = axes

    def observe(self, x: Tensor) -> None:
        """Add the values of x, fp32 of any shape with the axes given.

        Raises ExportError naming the value when one of them is NaN or infinite.
        """
        size = x.float().abs()
        bins = (size.contiguous().view(torch.int32) >> 16).flatten()
        counts = torch.bincount(bins, minlength=_BINS).numpy()
        _require_finite(self.name, int(counts[_FINITE:].sum()), x.numel())
        axes = sorted(axis % x.dim() for axis in self._axes)
        others = [axis for axis in range(x.dim()) if axis not in axes]
        found = Statistics(self.name, self._axes)
        found.counts = counts[:_FINITE]
        found.channel_absmax = (size.amax(others) if others else size).numpy()
        self.merge(found)

    def merge(self, other: Statistics) -> None:
        """Add what another saw of the same value. Any order and grouping gives the same."""
        if not self.channel_absmax.size:
            self.channel_absmax = other.channel_absmax.copy()
        elif other.channel_absmax.size:
            self.channel_absmax = np.maximum(self.channel_absmax, other.channel_absmax)
        self.counts = self.counts + other.counts

    @property
    def count(self) -> int:
        """How many numbers were seen."""
        return int(self.counts.sum())

    @property
    def absmax(self) -> float:
        """The largest |x|; 0 when nothing was seen."""
        return float(self.channel_absmax.max(initial=0))

    def percentile(self, p: float) -> float:
        """The |x| that p % of the numbers do not exceed (Quamba, arXiv 2410.13229, section 4.2).

        Numbers are taken to lie evenly within a bin; 100 is exactly the absmax.
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
        """The clip s with the least expected squared error (OCTAV, arXiv 2206.06501, equation 6).

        The paper's recursion, s ← E[|X|·1{|X|>s}] / (c·E[1{|X|≤s}] + E[1{|X|>s}]), run until it
        stands still. c·s² is the rounding noise, a twelfth of the squared step. The paper's step
        s/2^(B-1) gives c = 4^-B / 3; ours is s/(2^(B-1) - 1), hence c = 1 / (12·(2^(B-1) - 1)²).

        s times the denominator, minus the numerator, rises with s: there is one fixed point, and
        a step that would leave the interval known to hold it halves the interval instead.
        """
        if not self.absmax:
            return 0.0
        noise = 1 / (12 * (2 ** (bits - 1) - 1) ** 2)
        left, right = 0.0, self.absmax
        s = self.percentile(50)
        for _ in range(_TURNS):
            beyond, total = self._tail(s)
            following = total / (noise * (1 - beyond) + beyond)
            if abs(following - s) <= _STILL * s:
                break
            left, right = (s, right) if following > s else (left, s)
            s = following if left < following < right else (left + right) / 2
        return s

    def clipped(self, scale: float) -> float:
        """The share of numbers that a scale saturates: |x| beyond 127.5 · scale."""
        return self._tail((_LARGEST + 0.5) * scale)[0] if self.count else 0.0

    def _edges(self) -> tuple[F64, F64]:
        """Where each bin begins and ends; no further than the absmax."""
        return _LOW[:-1], np.minimum(_LOW[1:], self.absmax)

    def _tail(self, s: float) -> tuple[float, float]:
        """(E[1{|X|>s}], E[|X|·1{|X|>s}]), numbers lying evenly within their bins."""
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
    """What was seen.

    Attributes:
        values, rotated: value name → its statistics, and those of its Hadamard rotation.
        text: what was fed: `CalibrationText.record`.
    """

    values: Mapping[str, Statistics]
    rotated: Mapping[str, Statistics] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)

    def statistics(self, value: str, rotated: bool = False) -> Statistics:
        """What was seen of a value of the fp32 graph, or of its rotation.

        Raises KeyError if it was not asked for.
        """
        return (self.rotated if rotated else self.values)[value]


def _require_finite(name: str, bad: int, count: int) -> None:
    if bad:
        raise ExportError(
            f"{bad} of {count} values are NaN or infinite during calibration",
            field=name,
            remedy="the model overflows in fp32 on this text: calibrate with another, or look at "
            "this layer's weights",
        )


def scale_of(limit: float | F32) -> F32:
    """The int8 scale, limit / 127, of values up to `limit`: fp32 [1], or one a channel.

    Where the limit is 0 (or so small that fp32 could not divide by the scale) all values round to
    0 whatever the scale, which is then 1.
    """
    scale = np.asarray(limit, np.float32).reshape(-1) / np.float32(_LARGEST)
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale).astype(np.float32)


@dataclass
class Hessian:
    """Xᵀ·X of a value's rows, f64 [K, K], for GPTQ (arXiv 2210.17323, section 3).

    The only statistic of floating sums: it depends on the order of sequences in its last bits,
    which is why calibration fixes that order.
    """

    name: str
    rows: int = 0
    total: F64 | None = None

    def observe(self, x: Tensor) -> None:
        """Add x, fp32 [..., K]. Raises ExportError naming the value for a NaN or an infinity."""
        wide = x.double().flatten(0, -2)
        _require_finite(self.name, int((~torch.isfinite(wide)).sum()), x.numel())
        product: Any = (wide.T @ wide).numpy()
        self.total = product if self.total is None else self.total + product
        self.rows += wide.shape[0]


@dataclass
class Routes:
    """Which experts tokens went to: of the value `chosen`, i32 [..., k].

    Attributes:
        tokens: i64 [X], how many went to each of X experts.
        last: what was seen last.
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
    """`Hessian` of what each expert reads of a value with a slot for each, f64 [X, K, K].

    `routes` has to have seen where the slots went.
    """

    name: str
    routes: Routes
    total: F64 | None = None

    def observe(self, x: Tensor) -> None:
        """Add x, fp32 [..., k·K]. Raises ExportError naming the value for what is not finite."""
        chosen = self.routes.last
        assert chosen is not None
        _require_finite(self.name, int((~torch.isfinite(x)).sum()), x.numel())
        rows = x.double().unflatten(-1, (chosen.shape[-1], -1))
        if self.total is None:
            self.total = np.zeros((self.routes.experts, rows.shape[-1], rows.shape[-1]))
        for expert in chosen.unique().tolist():
            own = rows[chosen == expert]
            self.total[expert] += (own.T @ own).numpy()
