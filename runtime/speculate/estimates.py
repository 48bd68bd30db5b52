"""What a round of any shape would bring and cost, from rounds of other shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge.runtime.speculate.policy import Round
from edge.runtime.speculate.shape import LOOK_UP, Shape

ONE = Shape.of_chain(1)


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
    _first: list[float] = field(default_factory=list)

    def add_seconds(self, value: float) -> None:
        """The first runs may be slower than those after them: of the first three the middle one
        counts, of two the lesser.
        """
        if len(self._first) < self.FEW:
            self._first = sorted([*self._first, value])
            self.count += 1
            self.value = self._first[(len(self._first) - 1) // 2]
        else:
            self.add(min(value, self.OUTLIER * self.value))

    def add(self, value: float, times: int = 1) -> None:
        """`value`: of `times` values the mean."""
        self.count = min(self.count + times, self.LIMIT)
        self.value += (value - self.value) * times / self.count

    def scale(self, times: float) -> None:
        """As if all values had been so many times as large."""
        self.value *= times
        self._first = [times * value for value in self._first]

    def toward(self, other: float, weight: float) -> float:
        """The mean of what was seen and `weight` times `other`."""
        return (self.value * self.count + other * weight) / (self.count + weight)


class Slope:
    """Seconds that each of several things takes, as a quotient of sums: one alone is lost in the
    noise of what else was timed. It forgets: of about the last `LIMIT` times.
    """

    LIMIT = 70

    def __init__(self) -> None:
        self._seconds = 0.0
        self._things = 0.0

    def add(self, seconds: float, things: int) -> None:
        """`seconds` may be less than nothing, by noise."""
        kept = 1 - 1 / self.LIMIT
        self._seconds = kept * self._seconds + seconds
        self._things = kept * self._things + things

    def scale(self, times: float) -> None:
        """As if all seconds had been so many times as many."""
        self._seconds *= times

    def toward(self, other: float, things: float) -> float:
        """What was seen, and as if `things` more had taken `other` each."""
        seconds = self._seconds + other * things
        return max(seconds / (self._things + things), 0.1 * other)


class Rate(Mean):
    """How often something stands, over many answers."""

    LIMIT = 300


class Shift:
    """How much better than usual, or worse, a drafter does in this answer: what all its rates are
    moved by, as logarithms of odds. One number, for an answer is over before there could be more.

    It is normal with a mean of 0 before the answer begins; each token that stands or does not moves
    it by a step of an extended Kalman filter. `CERTAIN` keeps it moving as a text goes on.
    """

    # standard deviation between answers: of the demonstration pair's, and of look-up's in them
    BETWEEN = 0.7
    CERTAIN = 30.0
    # of what is known, after a round that says nothing of it: texts change
    KEPT = 0.99

    def __init__(self) -> None:
        self._by = 0.0
        self._times = 1.0  # what odds are multiplied by
        self._certainty = self.BETWEEN**-2

    def of(self, rate: float) -> float:
        """What becomes of a rate; nothing is certain: rates have odds."""
        rate = 0.02 if rate < 0.02 else 0.98 if rate > 0.98 else rate
        moved = rate * self._times
        return moved / (1 - rate + moved)

    @property
    def moved(self) -> bool:
        """Whether anything was learned."""
        return self._by != 0

    def learn(self, rate: float, stood: bool) -> None:
        """`rate`: the usual one."""
        expected = self.of(rate)
        information = expected * (1 - expected)
        self._certainty = min(self._certainty + information, self.CERTAIN)
        moved = self._by + (stood - expected) / self._certainty
        self._by = min(max(moved, -4.0), 4.0)
        self._times = math.exp(self._by)

    def fade(self, rounds: int = 1) -> None:
        """Rounds went by that said nothing."""
        before, kept = self.BETWEEN**-2, self.KEPT**rounds
        self._by *= kept
        self._times = math.exp(self._by)
        self._certainty = before + kept * (self._certainty - before)


class Acceptance:
    """How often a token of a drafting model stands, by its depth and its rank among its siblings,
    given that its parent stood and its earlier siblings did not.

    A chain of K says something of all chains and, for first children, of all trees; so a round of
    any shape lets the tokens of every other be predicted.
    """

    # before anything was seen, of the first child; of each next one half as often
    FIRST = 0.5
    # of so many tokens
    BELIEVED = 4.0

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Rate] = {}

    def rate(self, depth: int, rank: int) -> float:
        """About that of the depth above, until it is known better."""
        assumed = self.rate(depth - 1, rank) if depth else self.FIRST / 2.0**rank
        seen = self._seen.get((depth, rank))
        return assumed if seen is None else seen.toward(assumed, self.BELIEVED)

    def learn(self, done: Round, shift: Shift) -> None:
        for depth, offered in enumerate(done.offered):
            stood = done.ranks[depth] if depth < len(done.ranks) else None
            if not offered and depth < done.asked.depth:
                offered = 1  # a draft that ends early fails there
            for rank in range(offered if stood is None else stood + 1):
                shift.learn(self.rate(depth, rank), rank == stood)
                self._seen.setdefault((depth, rank), Rate()).add(rank == stood)

    def tokens(self, shapes: Sequence[Shape], shift: Shift) -> list[float]:
        """Expected tokens of rounds: 1 + Σ over depths of Π over those down to it of P(one of the
        children stands).
        """
        standing: dict[tuple[int, int], float] = {}
        found = []
        for shape in shapes:
            expected = reached = 1.0
            for depth, branches in enumerate(shape.branches):
                if (depth, branches) not in standing:
                    standing[depth, branches] = self._one_of(depth, branches, shift)
                reached *= standing[depth, branches]
                expected += reached
            found.append(expected)
        return found

    def _one_of(self, depth: int, branches: int, shift: Shift) -> float:
        refused = 1.0
        for rank in range(branches):
            refused *= 1 - shift.of(self.rate(depth, rank))
        return 1 - refused


class Repetition:
    """How often what followed the last time follows again, by how many tokens matched before it.

    A token that stands makes the match one longer, so one table does for all depths of a draft.
    """

    # a match of so many tokens or more
    LONGEST = 16
    # before anything was seen: of a match of two tokens, and for each token more
    SHORT = 0.4
    LONGER = 0.05
    BELIEVED = 8.0
    # tokens that stand less often are not counted: most matches are not worth the time to do so
    HARDLY = 0.05

    def __init__(self) -> None:
        # what is longer than the longest is as that, as far as a draft goes
        self._rates = [
            Rate(min(self.SHORT + self.LONGER * (matched - 2), 0.95), self.BELIEVED)
            for matched in range(self.LONGEST)
        ]
        self._rates += [Rate(0.95, self.BELIEVED)] * self.LONGEST

    def learn(self, matched: int, stood: list[bool], shift: Shift) -> None:
        """`stood`: of each token, up to the first that did not."""
        for rate, this in zip(self._rates[min(matched, self.LONGEST) :], stood, strict=False):
            shift.learn(rate.value, this)
            rate.add(this)

    def tokens(self, matched: int, depth: int, shift: Shift) -> list[float]:
        """Expected tokens of rounds with chains of 0, 1, … `depth` tokens."""
        expected = reached = 1.0
        found = [expected]
        matched = min(matched, self.LONGEST)
        for rate in self._rates[matched : matched + depth]:
            reached *= shift.of(rate.value)
            if reached < self.HARDLY:
                break
            expected += reached
            found.append(expected)
        return found + [expected] * (depth + 1 - len(found))


@dataclass
class Costs:
    """Seconds of rounds that were not run, from those that were.

    A drafting model's time is taken to grow with its runs, one a depth, a little with their batch,
    and with the tokens that it has to read first; the target's with the tokens beyond the first.
    Chains and trees are measured apart, and stand in for one another where only one was run.

    Attributes:
        step: of a plain step after another.
        after: what the round after a verifying run takes longer, a step that has to apply what was
            logged; nothing where it verifies too.
        in_vain: of a drafting model that had nothing to say.
        look_up: of finding a draft without a model.
        run: of a drafting model's run, in steps, before anything was drafted.
    """

    # in steps, before anything was drafted: of any verifying run beyond the step's own, of each of
    # its tokens
    ANY = 0.06
    TOKEN = 0.1
    # of a drafter's run: for every sequence of a batch beyond the first, for a token more to read
    SEQUENCE = 0.15
    READ = 0.05
    # of what is expected of a verifying run: more says nothing
    LONGEST = 1.5
    # own runs of as many tokens count against what others tell of them after so many
    PREDICTED = 4.0
    # how many times as quick or as slow a step has to become for the machine to be another
    CHANGED = 1.3

    run: float = 0.3
    step: Mean = field(default_factory=Mean)
    after: Mean = field(default_factory=lambda: Mean(0.0, 4.0))
    in_vain: Mean = field(default_factory=Mean)
    look_up: Mean = field(default_factory=Mean)
    _run: dict[bool, Mean] = field(default_factory=lambda: {True: Mean(), False: Mean()})
    _token: dict[bool, Slope] = field(default_factory=lambda: {True: Slope(), False: Slope()})
    _own: dict[tuple[bool, int], Mean] = field(default_factory=dict)
    _read: Slope = field(default_factory=Slope)
    _then: float = 0.0  # a step's, when drafts were timed last

    def follow(self) -> None:
        """Where steps have become quicker or slower since drafts were timed last, take it that
        drafts have too: nobody may be asking for any.
        """
        times = self.step.value / self._then if self._then else 1.0
        if 1 / self.CHANGED < times < self.CHANGED:
            return
        self._then = self.step.value
        for mean in (self.after, self.in_vain, self.look_up, *self._run.values()):
            mean.scale(times)
        for mean in self._own.values():
            mean.scale(times)
        for slope in (*self._token.values(), self._read):
            slope.scale(times)

    def learn_after(self, seconds: float) -> float:
        """Of a step that came after a verifying run; about what it would have taken elsewhere."""
        alone = seconds - self.after.value
        self.after.add(min(seconds, Mean.OUTLIER * self.step.value) - self.step.value)
        return alone

    def learn_run(self, done: Round) -> None:
        """Of a verifying run."""
        shape, nodes = done.asked, done.nodes
        self._then = self.step.value
        if shape.source == LOOK_UP:
            self.look_up.add(min(done.draft_s, self.step.value))
        # a process that was put to sleep says nothing
        seconds = min(done.verify_s, self.LONGEST * self._verifying(shape.chain, nodes))
        self._token[shape.chain].add(seconds - (1 + self.ANY) * self.step.value, nodes)
        self._own.setdefault((shape.chain, nodes), Mean()).add(seconds)

    def learn_draft(self, done: Round) -> None:
        """The drafting model's part."""
        if not done.nodes:
            self.in_vain.add(done.draft_s)
            return
        runs, more = self._runs(done.asked), done.outlook.behind - 1
        if more > 2:
            expected = self.draft(done.asked) + self.read * more
            seconds = min(done.draft_s, Mean.OUTLIER * expected)
            self._read.add(seconds - self.draft(done.asked), more)
        else:
            self._run[done.asked.chain].add_seconds(done.draft_s / runs)

    def _runs(self, shape: Shape) -> float:
        """Of one sequence, that a drafting model's time for a draft is worth."""
        batches = shape.widths[:-1]
        return 1 + len(batches) + self.SEQUENCE * (sum(batches) - len(batches))

    def draft(self, shape: Shape) -> float:
        """Of a drafting model that has read all but the pending token."""
        assumed = self._run[not shape.chain].toward(self.run * self.step.value, 1.0)
        return self._run[shape.chain].toward(assumed, 1.0) * self._runs(shape)

    @property
    def read(self) -> float:
        """Of a token more that a drafting model has to read first."""
        return self._read.toward(self.READ * self.draft(ONE), 20.0)

    def verify(self, chain: bool, nodes: int) -> float:
        """Of the target's run, and what it costs later."""
        return max(0.0, self.after.value) + self._verifying(chain, nodes)

    def _verifying(self, chain: bool, nodes: int) -> float:
        assumed = self._token[not chain].toward(self.TOKEN * self.step.value, 3.0)
        token = self._token[chain].toward(assumed, 3.0)
        predicted = (1 + self.ANY) * self.step.value + token * nodes
        own = self._own.get((chain, nodes))
        return predicted if own is None else own.toward(predicted, self.PREDICTED)
