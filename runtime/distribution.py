"""What the next token is drawn from: weights, summed once and normalized nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 512  # weights summed at once


class Distribution:
    """Tokens and what each of them weighs.

    Attributes:
        ids: [n], distinct, in any order; None for all of the vocabulary, in order.
        weights: [n], none negative; fp32 as they are sampled from, fp64 as differences.
        total: their sum, 0 where there is nothing to draw.
    """

    __slots__ = ("_sums", "ids", "total", "weights")

    def __init__(
        self,
        ids: NDArray[np.intp] | None,
        weights: NDArray[Any],
        sums: NDArray[np.float64] | None = None,
    ) -> None:
        """`sums`: running sums of the weights, where they are known."""
        self.ids = ids
        self.weights = weights
        if sums is None:
            sums = _block_sums(weights).cumsum()
        self._sums = sums
        self.total = float(sums[-1])

    def draw(self, uniform: float) -> int:
        """The token whose share of the whole holds `uniform` in [0, 1); never one of weight 0."""
        weights, sums, start = self.weights, self._sums, 0
        wanted = uniform * self.total
        if len(sums) < len(weights):
            block = min(int(sums.searchsorted(wanted, side="right")), len(sums) - 1)
            wanted -= float(sums[block - 1]) if block else 0.0
            start = block * _BLOCK
            sums = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
        index = start + int(sums.searchsorted(wanted, side="right"))
        if index == start + len(sums):
            # rounding left `wanted` at the very end
            index = int(weights[:index].nonzero()[0][-1])
        return index if self.ids is None else int(self.ids[index])

    def of(self, token: int) -> float:
        """The probability of one token; 0 for one that cannot be drawn."""
        if self.ids is None:
            return float(self.weights[token]) / self.total
        at = int((self.ids == token).argmax())
        return float(self.weights[at]) / self.total if self.ids[at] == token else 0.0

    def probabilities(self) -> NDArray[np.float64]:
        """[n], of each token; they sum to 1."""
        return np.multiply(self.weights, 1 / self.total, dtype=np.float64)

    def without(self, token: int) -> Distribution:
        """What a second, different token is drawn from."""
        weights = self.weights.copy()
        weights[token if self.ids is None else self.ids == token] = 0
        return Distribution(self.ids, weights)

    def minus(self, other: Distribution) -> Distribution:
        """max(p - q, 0) of the probabilities, q being those of the other."""
        ids, rest, taken = self.ids, self.probabilities(), other.probabilities()
        if other.ids is not None:
            size = len(rest) if ids is None else 1 + max(int(ids.max()), int(other.ids.max()))
            everywhere = np.zeros(size)
            everywhere[other.ids] = taken
            taken = everywhere
        rest -= taken if ids is None else taken[ids]
        return Distribution(ids, np.maximum(rest, 0, out=rest))


def _block_sums(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Of each `_BLOCK` weights: a running sum over a whole vocabulary would cost more than the
    rest. Few weights are blocks of their own.
    """
    if len(weights) <= _BLOCK:
        return weights.astype(np.float64)
    starts = np.arange(0, len(weights), _BLOCK)
    return np.add.reduceat(weights, starts, dtype=np.float64)
