"""What a round of any shape would bring and cost, from rounds of other shapes."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.runtime.speculate.policy import Round
from edge.runtime.speculate.shape import Shape


@dataclass
class Mean:
    """A mean that forgets: of about the last `LIMIT` values; `count` of them so far.

    With a `count` to begin with, `value` is believed that much before anything was seen.
    """

    LIMIT = 70
    FEW = 3
    # seconds are at most so many times the mean: a process that was put to sleep says nothing
    OUTLIER = 2

    value: float = 0.0
    count: float = 0.0

    def add_seconds(self, value: float) -> None:
        """The first runs are slower than those after them: of the first three the least counts."""
        if 0 < self.count < self.FEW:
            self.value = value = min(self.value, value)
        elif self.count:
            value = min(value, self.OUTLIER * self.value)
        self.add(value)

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self.LIMIT)
        self.value += (value - self.value) / self.count

    def toward(self, other: float, weight: float) -> float:
        """The mean of what was seen and `weight` times `other`."""
        return (self.value * self.count + other * weight) / (self.count + weight)


class Acceptance:
    """How often a drafted token stands, by its depth and its rank among its siblings, given that
    its parent stood and its earlier siblings did not.

    A chain of K says something of all chains and, for first children, of all trees; so a round of
    any shape lets the tokens of every other be predicted.
    """

    # before anything was seen, of the first child; of each next one half as often
    FIRST = 0.6
    # a depth of its own counts against all depths together after this many tries
    POOLED = 4.0

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], Mean] = {}
        self._anywhere: dict[int, Mean] = {}
        self._rates: dict[tuple[int, int], float] = {}

    def learn(self, done: Round) -> None:
        self._rates.clear()
        for depth, offered in enumerate(done.offered):
            stood = done.ranks[depth] if depth < len(done.ranks) else None
            if not offered and depth < done.asked.depth:
                offered = 1  # a draft that ends early fails there
            for rank in range(offered if stood is None else stood + 1):
                self._add(depth, rank, rank == stood)

    def _add(self, depth: int, rank: int, stood: bool) -> None:
        self._at.setdefault((depth, rank), Mean()).add(stood)
        self._anywhere.setdefault(rank, Mean(self._prior(rank), 2.0)).add(stood)

    def _prior(self, rank: int) -> float:
        return self.FIRST / 2.0**rank

    def rate(self, depth: int, rank: int) -> float:
        found = self._rates.get((depth, rank))
        if found is None:
            found = self._rates[depth, rank] = self._rate(depth, rank)
        return found

    def _rate(self, depth: int, rank: int) -> float:
        anywhere = self._anywhere.get(rank)
        pooled = self._prior(rank) if anywhere is None else anywhere.value
        here = self._at.get((depth, rank))
        return pooled if here is None else here.toward(pooled, self.POOLED)

    def tokens(self, shape: Shape) -> float:
        """Expected tokens of a round: 1 + Σ over depths of Π over those down to it of P(one of the
        children stands).
        """
        expected = reached = 1.0
        for depth, branches in enumerate(shape.branches):
            refused = 1.0
            for rank in range(branches):
                refused *= 1 - self.rate(depth, rank)
            reached *= 1 - refused
            expected += reached
        return expected


@dataclass
class Costs:
    """Seconds of rounds that were not run, from those that were.

    A drafter's time is taken to grow with its runs, one a depth, and a little with their batch; the
    target's with the tokens beyond the first. Chains and trees are measured apart, and stand in for
    one another where only one of them was run.

    Attributes:
        step: of a plain step.
        own: shape → of its whole rounds.
    """

    # in steps, before anything was drafted: of a drafter's run, of a token more in the target's
    RUN = 0.4
    TOKEN = 0.1
    # of a drafter's run, for every sequence of a batch beyond the first
    SEQUENCE = 0.15

    step: Mean = field(default_factory=Mean)
    own: dict[Shape, Mean] = field(default_factory=dict)
    _run: dict[bool, Mean] = field(default_factory=lambda: {True: Mean(), False: Mean()})
    _token: dict[bool, Mean] = field(default_factory=lambda: {True: Mean(), False: Mean()})

    def learn(self, done: Round) -> None:
        if not done.nodes:
            self.step.add_seconds(done.verify_s)
            return
        shape = done.asked
        self.own.setdefault(shape, Mean()).add_seconds(done.draft_s + done.verify_s)
        self._run[shape.chain].add_seconds(done.draft_s / self._runs(shape))
        self._token[shape.chain].add(max(0.0, done.verify_s - self.step.value) / done.nodes)

    def _runs(self, shape: Shape) -> float:
        batches = (1, *shape.widths[:-1])
        return sum(1 + self.SEQUENCE * (batch - 1) for batch in batches)

    def seconds(self, shape: Shape) -> float:
        """Of a round."""
        run = self._known(self._run, shape.chain, self.RUN)
        token = self._known(self._token, shape.chain, self.TOKEN)
        predicted = self.step.value + run * self._runs(shape) + token * shape.nodes
        own = self.own.get(shape)
        return predicted if own is None else own.toward(predicted, 1.0)

    def _known(self, means: dict[bool, Mean], chain: bool, steps: float) -> float:
        # by one round alone hardly anything is known: what was assumed counts as one more
        assumed = means[not chain].toward(steps * self.step.value, 1.0)
        return means[chain].toward(assumed, 1.0)
