"""What a round of any shape would bring and cost, from rounds of other shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge.runtime.speculate.shape import Shape

Pair = tuple[float, float]


@dataclass
class Mean:
    """A mean that forgets: of about the last `limit` values; `count` of them so far.

    With a `count` to begin with, `value` is believed that much before anything was seen.
    """

    value: float = 0.0
    count: float = 0.0
    limit: float = 70

    def add(self, value: float, times: int = 1) -> None:
        """Add the mean of `times` values."""
        self.count = min(self.count + times, self.limit)
        self.value += (value - self.value) * times / self.count

    def toward(self, other: float, weight: float) -> float:
        """The mean of what was seen and `weight` times `other`."""
        return (self.value * self.count + other * weight) / (self.count + weight)


class Fit:
    """What two things cost, from what so much of one and so much of the other cost together.

    Least squares over about the last `LIMIT` times, beside a guess that is believed as if it had
    been seen: with `weights` (w, w') as often as sums of squares of w and w' tell.
    """

    LIMIT = 70
    # more than this many times the expected time: the run was disturbed
    OUTLIER = 1.5

    def __init__(self, weights: Pair, few: int = 0) -> None:
        """The first `few` are believed whatever they cost: the guess may be far off."""
        self._weights, self._few = weights, few
        self._squares = (0.0, 0.0, 0.0)
        self._sums = (0.0, 0.0)
        self.seen = 0

    def learn(self, amounts: Pair, cost: float, guess: Pair) -> None:
        """`guess`: see `each`."""
        a, b = amounts
        one, other = self.each(guess)
        if self.seen >= self._few:
            cost = min(cost, self.OUTLIER * (a * one + b * other))
        kept = 1 - 1 / self.LIMIT
        aa, ab, bb = self._squares
        self._squares = (kept * aa + a * a, kept * ab + a * b, kept * bb + b * b)
        self._sums = (kept * self._sums[0] + a * cost, kept * self._sums[1] + b * cost)
        self.seen += 1

    def fade(self, kept: float) -> None:
        """Let past observations count only `kept` as much."""
        self._squares = (kept * self._squares[0], kept * self._squares[1], kept * self._squares[2])
        self.scale(kept)

    def scale(self, times: float) -> None:
        """Multiply all past costs."""
        self._sums = (times * self._sums[0], times * self._sums[1])

    def each(self, guess: Pair) -> Pair:
        """The cost of one of either thing: a tenth of the guess at least."""
        aa, ab, bb = self._squares
        aa, bb = aa + self._weights[0], bb + self._weights[1]
        p = self._sums[0] + self._weights[0] * guess[0]
        q = self._sums[1] + self._weights[1] * guess[1]
        whole = aa * bb - ab * ab
        one, other = (p * bb - q * ab) / whole, (q * aa - p * ab) / whole
        return max(one, 0.1 * guess[0]), max(other, 0.1 * guess[1])


class Costs:
    """What rounds cost in steps of the target, so that what is known goes with the machine.

    A drafting model's time grows with its runs, one a depth, a little with their batch, and with
    the tokens that it has to read first; the target's with the tokens beyond the first. Chains and
    trees are measured apart, and stand in for one another where only one was run.

    Attributes:
        step: seconds of a plain step after another.
        after: what the round after a verifying run takes longer, a step that has to apply what was
            logged; nothing where it verifies too.
        in_vain: of a drafting model that had nothing to say.
    """

    # of any verifying run, and of each token of it, before any was run
    VERIFY = (1.06, 0.1)
    # of a drafter's run: for every sequence of a batch beyond the first, for a token more to read
    SEQUENCE = 0.15
    READ = 0.05
    # steps before anything is compared with them; how much one may differ from what is known
    FEW, ABOUT = 3, 0.2
    # seconds are cut at this many times the mean: a process that was suspended says nothing
    OUTLIER = 2

    def __init__(self, run: float = 0.3) -> None:
        """`run`: of a drafting model's run, before anything was drafted."""
        self.step = Mean()
        self.after = Mean(count=4.0)
        self.in_vain = Mean()
        self._last: list[float] = []  # steps
        self._run = (run, self.READ * run)
        self._drafts = {chain: Fit((0.5, 10.0), few=3) for chain in (True, False)}
        self._verified = {chain: Fit((5.0, 3.0)) for chain in (True, False)}

    def learn_step(self, seconds: float, times: int = 1, *, drafting: bool = False) -> bool:
        """Learn the mean of `times` steps; returns whether it is close to the estimate. Three in a
        row that are not mean that the machine became faster or slower. `drafting`: rounds with
        drafts came between, and were compared with a wrong estimate.
        """
        step, known = self.step, self.step.value
        seconds = max(seconds, 1e-9)  # a clock may stand still, and all is divided by steps
        self._last = (self._last + [seconds] * min(times, self.FEW))[-self.FEW :]
        usual = sorted(self._last)[(len(self._last) - 1) // 2]
        if step.count < self.FEW or abs(usual - known) > self.ABOUT * known:
            if drafting and step.count >= self.FEW:
                for fit in (*self._drafts.values(), *self._verified.values()):
                    fit.scale(known / usual)
            step.value, step.count = usual, len(self._last)
            return False
        step.add(min(seconds, self.OUTLIER * known), times)
        return abs(seconds - known) <= self.ABOUT * known

    def learn_after(self, seconds: float) -> float:
        """Learn a step that followed a verifying run; about what it would have taken elsewhere."""
        if not self.step.count:
            return seconds
        step, alone = self.step.value, seconds - self.after.value * self.step.value
        self.after.add(min(seconds, self.OUTLIER * step) / step - 1)
        return alone

    def runs(self, shape: Shape) -> float:
        """The cost of a draft, in runs of the drafting model on one sequence."""
        batches = shape.widths[:-1]
        return 1 + len(batches) + self.SEQUENCE * (sum(batches) - len(batches))

    def drafting(self, chain: bool) -> Pair:
        """(of a drafting model's run, of a token that it reads first)."""
        return self._drafts[chain].each(self._guess(self._drafts, chain, self._run))

    def verifying(self, chain: bool) -> Pair:
        """(of any verifying run, what it costs later too; of each drafted token)."""
        return self._verified[chain].each(self._guess(self._verified, chain, self.VERIFY))

    def learn_draft(self, shape: Shape, more: int, seconds: float) -> None:
        """`more`: tokens that were read first."""
        guess = self._guess(self._drafts, shape.chain, self._run)
        amounts = (self.runs(shape), float(more))
        self._drafts[shape.chain].learn(amounts, seconds / self.step.value, guess)

    def learn_run(self, chain: bool, nodes: int, seconds: float) -> None:
        """Learn what a verifying run took."""
        guess = self._guess(self._verified, chain, self.VERIFY)
        self._verified[chain].learn((1.0, float(nodes)), seconds / self.step.value, guess)

    def fade(self, kept: float) -> None:
        """Let past costs of drafts count only `kept` as much: old ones are no reason not to try."""
        for fit in self._drafts.values():
            fit.fade(kept)

    def _guess(self, fits: dict[bool, Fit], chain: bool, otherwise: Pair) -> Pair:
        other = fits[not chain]
        return other.each(otherwise) if other.seen else otherwise


class Shift:
    """How much better than usual, or worse, a drafter does in this answer: what all its rates are
    moved by, as logarithms of odds. One number, for an answer is over before there could be more.

    It is normal with a mean of 0 before the answer begins; each token that is accepted or is not
    moves it by a step of an extended Kalman filter. `CERTAIN` keeps it moving as a text continues.
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

    def learn(self, rate: float, accepted: bool) -> None:
        """`rate`: the usual one."""
        expected = self.of(rate)
        self._certainty = min(self._certainty + expected * (1 - expected), self.CERTAIN)
        moved = self._by + (accepted - expected) / self._certainty
        self._by = min(max(moved, -4.0), 4.0)
        self._times = math.exp(self._by)

    def fade(self, rounds: int = 1) -> None:
        """Rounds went by that said nothing."""
        before, kept = self.BETWEEN**-2, self.KEPT**rounds
        self._by *= kept
        self._times = math.exp(self._by)
        self._certainty = before + kept * (self._certainty - before)


class Acceptance:
    """How often a token of a drafting model is accepted, by its depth and its rank among its
    siblings, given that its parent was and its earlier siblings were not.

    A chain of K says something of all chains and, for first children, of all trees; so a round of
    any shape lets the tokens of every other be predicted.
    """

    # before anything was seen, of the first child; of each next one half as often
    FIRST = 0.5
    # of so many tokens
    BELIEVED = 4.0

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Mean] = {}

    def rate(self, depth: int, rank: int) -> float:
        """About that of the depth above, until it is known better."""
        assumed = self.rate(depth - 1, rank) if depth else self.FIRST / 2.0**rank
        seen = self._seen.get((depth, rank))
        return assumed if seen is None else seen.toward(assumed, self.BELIEVED)

    def learn(
        self, asked: Shape, offered: Sequence[int], ranks: Sequence[int], shift: Shift
    ) -> None:
        """`offered`, `ranks`: see `Round`."""
        for depth, children in enumerate(offered):
            accepted = ranks[depth] if depth < len(ranks) else None
            if not children and depth < asked.depth:
                children = 1  # a draft that ends early fails there
            for rank in range(children if accepted is None else accepted + 1):
                shift.learn(self.rate(depth, rank), rank == accepted)
                self._seen.setdefault((depth, rank), Mean(limit=300)).add(rank == accepted)

    def tokens(self, shapes: Iterable[Shape], shift: Shift) -> list[float]:
        """Expected tokens of rounds: 1 + Σ over depths of Π over those down to it of P(one of the
        children is accepted).
        """
        refused: dict[tuple[int, int], float] = {}
        found = []
        for shape in shapes:
            expected = reached = 1.0
            for depth, branches in enumerate(shape.branches):
                for rank in range(branches):
                    if (depth, rank + 1) not in refused:
                        this = 1 - shift.of(self.rate(depth, rank))
                        refused[depth, rank + 1] = refused.get((depth, rank), 1.0) * this
                reached *= 1 - refused[depth, branches]
                expected += reached
            found.append(expected)
        return found


class Repetition:
    """How often what followed the last time follows again, by how many tokens matched before it.

    A token that is accepted makes the match one longer, so one table does for all depths.
    """

    # a match of so many tokens or more
    LONGEST = 16
    # before anything was seen: of a match of two tokens, and for each token more
    SHORT = 0.4
    LONGER = 0.05
    BELIEVED = 8.0
    # tokens that are accepted less often are not counted: most matches are not worth the time
    HARDLY = 0.05

    def __init__(self) -> None:
        # what is longer than the longest is as that, as far as a draft goes
        rates = [min(self.SHORT + self.LONGER * (n - 2), 0.95) for n in range(self.LONGEST)]
        self._rates = [Mean(rate, self.BELIEVED, 300) for rate in rates]
        self._rates += [Mean(0.95, self.BELIEVED, 300)] * self.LONGEST

    def learn(self, matched: int, accepted: list[bool], shift: Shift) -> None:
        """`accepted`: of each token, up to the first that was not."""
        for rate, this in zip(self._rates[min(matched, self.LONGEST) :], accepted, strict=False):
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
