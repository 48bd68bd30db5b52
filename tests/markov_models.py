"""Models of a few tokens where the next token depends only on the last, and a test of counts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.draft import Draft, Drafter
from edge.runtime.speculate.model_drafter import Growth
from edge.runtime.speculate.shape import Shape

VOCAB = 6
SPECIAL = {5}


def table(seed: int, sharpness: float) -> np.ndarray:
    """Return logits [V, V] of the next token after each token."""
    rng = np.random.default_rng(seed)
    return (sharpness * rng.standard_normal((VOCAB, VOCAB))).astype(np.float32)


class TableContext:
    """The context that `Speculative` needs, for a model that is a table."""

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits
        self._run: list[int] = []
        self.tokens: list[int] = []
        self.pending: int | None = None
        self.state = SimpleNamespace(window=128, capacity=None)
        self.engine = SimpleNamespace(
            finds_argmax=False, run=lambda tokens, state: self._logits[tokens]
        )

    def verify(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> np.ndarray:
        if parents is None:
            self.tokens.extend(tokens)
        else:
            assert all(parent < node for node, parent in enumerate(parents))
        self._run = list(tokens)
        return self._logits[self._run]

    def keep(self, node: int, tokens: Sequence[int]) -> None:
        assert self._run[node] == tokens[-1]
        self.tokens.extend(tokens)

    def rewind(self, count: int) -> None:
        if count:
            del self.tokens[-count:]


class TableDrafter(Drafter):
    """Grow trees from a table, as `ModelDrafter` does from a model."""

    name = "table"
    nbytes = 0

    def __init__(self, logits: np.ndarray) -> None:
        self._logits = logits

    def propose(
        self, tokens: Sequence[int], pending: int, shape: Shape, sampler: Sampler, recent: list[int]
    ) -> Draft:
        growth = Growth(sampler, recent, SPECIAL)
        last = [pending]
        for count in shape.branches:
            last = growth.add([self._logits[token] for token in last], count)
        return growth.draft()


def shares(p: Distribution) -> dict[int, float]:
    """Return the probability of each token that can be drawn."""
    ids = range(len(p.weights)) if p.ids is None else p.ids.tolist()
    return {i: share for i, share in zip(ids, p.probabilities().tolist(), strict=True) if share}


def dense(p: Distribution) -> np.ndarray:
    """Return the probability of every token, [V]."""
    return np.array([shares(p).get(token, 0.0) for token in range(VOCAB)])


def deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return by how many standard deviations chi-square exceeds its mean (Wilson and Hilferty,
    1931).

    Cells with an expected count below five are merged.
    """
    assert not counts[expected == 0].any()
    wanted = expected * counts.sum()
    rare = wanted < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] == 0:
        seen, wanted = seen[:-1], wanted[:-1]
    freedom = len(seen) - 1
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)
