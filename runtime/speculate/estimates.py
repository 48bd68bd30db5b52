"""Estimates of the tokens and costs of rounds of any shape, learned from rounds of other shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge.runtime.speculate.shape import Shape

Pair = tuple[float, float]


@dataclass
class Mean:
    """A forgetting mean of about the last `limit` values, with `count` of them so far.

    An initial `count` gives the initial `value` the weight of that many observations.
    """

    value: float = 0.0
    count: float = 0.0
    limit: float = 70

    def add(self, value: float, times: int = 1) -> None:
        """Add the mean of `times` values."""
        self.count = min(self.count + times, self.limit)
        self.value += (value - self.value) * times / self.count

    def toward(self, other: float, weight: float) -> float:
        """Return the mean of the values seen and of `weight` values `other`."""
        return (self.value * self.count + other * weight) / (self.count + weight)


class Fit:
    """Two unit costs, fitted by least squares to the total costs of known amounts of both.

    Covers about the last `LIMIT` observations. A guess acts as a prior with the weight of
    observations whose squared amounts sum to `weights`.
    """

    LIMIT = 70
    # a run that takes more than this multiple of the expected time was disturbed
    OUTLIER = 1.5

    def __init__(self, weights: Pair, few: int = 0) -> None:
        """The first `few` costs are never cut as outliers, because the guess may be far off."""
        self._weights, self._few = weights, few
        self._squares = (0.0, 0.0, 0.0)
        self._sums = (0.0, 0.0)
        self.seen = 0

    def learn(self, amounts: Pair, cost: float, guess: Pair) -> None:
        """Learn the total cost of these amounts. `guess`: prior unit costs, as in `each`."""
        a, b = amounts
        first, second = self.each(guess)
        if self.seen >= self._few:
            cost = min(cost, self.OUTLIER * (a * first + b * second))
        decay = 1 - 1 / self.LIMIT
        aa, ab, bb = self._squares
        self._squares = (decay * aa + a * a, decay * ab + a * b, decay * bb + b * b)
        self._sums = (decay * self._sums[0] + a * cost, decay * self._sums[1] + b * cost)
        self.seen += 1

    def fade(self, kept: float) -> None:
        """Scale the weight of past observations by `kept`."""
        self._squares = (kept * self._squares[0], kept * self._squares[1], kept * self._squares[2])
        self.scale(kept)

    def scale(self, times: float) -> None:
        """Multiply all past costs by `times`."""
        self._sums = (times * self._sums[0], times * self._sums[1])

    def each(self, guess: Pair) -> Pair:
        """Return both unit costs, each at least a tenth of its guess."""
        aa, ab, bb = self._squares
        aa, bb = aa + self._weights[0], bb + self._weights[1]
        p = self._sums[0] + self._weights[0] * guess[0]
        q = self._sums[1] + self._weights[1] * guess[1]
        determinant = aa * bb - ab * ab
        first, second = (p * bb - q * ab) / determinant, (q * aa - p * ab) / determinant
        return max(first, 0.1 * guess[0]), max(second, 0.1 * guess[1])


class Costs:
    """Costs of rounds in steps of the target, so that they stay valid when the machine's speed
    changes.

    A drafting model's time grows with the number of its runs, one per depth, slightly with their
    batch size, and with the tokens that it reads first. The target's grows with the drafted tokens.
    Chains and trees are measured separately; until both were run, one stands in for the other.

    Attributes:
        step: seconds of a plain step that follows another.
        after: extra cost of the round after a verifying run: a step must apply the log, another
            verifying run costs nothing extra.
        in_vain: cost of a drafting model's call that proposed nothing.
    """

    # initial costs of any verifying run, and of each drafted token in it
    VERIFY = (1.06, 0.1)
    # parts of the cost of a drafter's run: each sequence beyond the first, each token read first
    SEQUENCE = 0.15
    READ = 0.05
    # steps needed before costs are relative to them; relative deviation that counts as close
    FEW, ABOUT = 3, 0.2
    # seconds are cut at this multiple of the mean: a suspended process must not distort it
    OUTLIER = 2

    def __init__(self, run: float = 0.3) -> None:
        """`run`: initial cost of a drafting model's run."""
        self.step = Mean()
        self.after = Mean(count=4.0)
        self.in_vain = Mean()
        self._recent: list[float] = []  # seconds of the last steps
        self._run = (run, self.READ * run)
        self._drafts = {chain: Fit((0.5, 10.0), few=3) for chain in (True, False)}
        self._verified = {chain: Fit((5.0, 3.0)) for chain in (True, False)}

    def learn_step(self, seconds: float, times: int = 1, *, drafting: bool = False) -> bool:
        """Learn the mean seconds of `times` steps. Return whether it is close to the estimate.

        If the median of the last three is not close, the machine's speed has changed and the
        estimate restarts. With `drafting`, rounds with drafts came between the steps, and their
        costs are rescaled.
        """
        step, known = self.step, self.step.value
        seconds = max(seconds, 1e-9)  # a clock may stand still, and costs are divided by steps
        self._recent = (self._recent + [seconds] * min(times, self.FEW))[-self.FEW :]
        usual = sorted(self._recent)[(len(self._recent) - 1) // 2]
        if step.count < self.FEW or abs(usual - known) > self.ABOUT * known:
            if drafting and step.count >= self.FEW:
                for fit in (*self._drafts.values(), *self._verified.values()):
                    fit.scale(known / usual)
            step.value, step.count = usual, len(self._recent)
            return False
        step.add(min(seconds, self.OUTLIER * known), times)
        return abs(seconds - known) <= self.ABOUT * known

    def learn_after(self, seconds: float) -> float:
        """Learn the seconds of a step after a verifying run. Return them without the extra cost."""
        if not self.step.count:
            return seconds
        step, alone = self.step.value, seconds - self.after.value * self.step.value
        self.after.add(min(seconds, self.OUTLIER * step) / step - 1)
        return alone

    def runs(self, shape: Shape) -> float:
        """Return the cost of a draft in runs of the drafting model on one sequence."""
        batches = shape.widths[:-1]
        return 1 + len(batches) + self.SEQUENCE * (sum(batches) - len(batches))

    def drafting(self, chain: bool) -> Pair:
        """Return (cost of a drafting model's run, cost of a token that it reads first)."""
        return self._drafts[chain].each(self._guess(self._drafts, chain, self._run))

    def verifying(self, chain: bool) -> Pair:
        """Return (cost of a verifying run without `after`, cost of each drafted token)."""
        return self._verified[chain].each(self._guess(self._verified, chain, self.VERIFY))

    def learn_draft(self, shape: Shape, more: int, seconds: float) -> None:
        """Learn the seconds of a draft. `more`: number of tokens that the model read first."""
        guess = self._guess(self._drafts, shape.chain, self._run)
        amounts = (self.runs(shape), float(more))
        self._drafts[shape.chain].learn(amounts, seconds / self.step.value, guess)

    def learn_run(self, chain: bool, nodes: int, seconds: float) -> None:
        """Learn the seconds of a verifying run of `nodes` drafted tokens."""
        guess = self._guess(self._verified, chain, self.VERIFY)
        self._verified[chain].learn((1.0, float(nodes)), seconds / self.step.value, guess)

    def fade(self, kept: float) -> None:
        """Scale the weight of past draft costs by `kept`: old ones must not prevent new drafts."""
        for fit in self._drafts.values():
            fit.fade(kept)

    def _guess(self, fits: dict[bool, Fit], chain: bool, default: Pair) -> Pair:
        other = fits[not chain]
        return other.each(default) if other.seen else default


class Shift:
    """How much better or worse than usual a drafter does in this answer, as one shift of the log
    odds of all its acceptance rates. An answer is too short to estimate more than one number.

    The prior is normal with mean 0; each accepted or rejected token updates it by a step of an
    extended Kalman filter. `CERTAIN` bounds the certainty, so that it keeps following the text.
    """

    # standard deviation between answers, of the demonstration pair and of look-up in its answers
    BETWEEN = 0.7
    CERTAIN = 30.0
    # share of the knowledge kept after a round without information: texts change
    KEPT = 0.99

    def __init__(self) -> None:
        self._log_shift = 0.0
        self._odds_factor = 1.0  # exp(_log_shift), the factor on the odds
        self._certainty = self.BETWEEN**-2

    def of(self, rate: float) -> float:
        """Return the shifted rate. Rates are limited to 0.02 … 0.98 so that odds stay finite."""
        rate = 0.02 if rate < 0.02 else 0.98 if rate > 0.98 else rate
        moved = rate * self._odds_factor
        return moved / (1 - rate + moved)

    def learn(self, rate: float, accepted: bool) -> None:
        """Learn from one token, whose usual acceptance rate is `rate`."""
        expected = self.of(rate)
        self._certainty = min(self._certainty + expected * (1 - expected), self.CERTAIN)
        moved = self._log_shift + (accepted - expected) / self._certainty
        self._log_shift = min(max(moved, -4.0), 4.0)
        self._odds_factor = math.exp(self._log_shift)

    def fade(self, rounds: int = 1) -> None:
        """Let knowledge fade by this many rounds without information."""
        prior, kept = self.BETWEEN**-2, self.KEPT**rounds
        self._log_shift *= kept
        self._odds_factor = math.exp(self._log_shift)
        self._certainty = prior + kept * (self._certainty - prior)


class Acceptance:
    """Acceptance rates of a drafting model's tokens by depth and rank among siblings, given that
    the parent was accepted and earlier siblings were not.

    A round of one shape informs the rates of all others: a chain those of all chains and of the
    first children in all trees. So the tokens of any shape can be predicted.
    """

    # initial rate of the first child; half as much for each next one
    FIRST = 0.5
    # weight of the assumed rate, in observed tokens
    BELIEVED = 4.0

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], Mean] = {}

    def rate(self, depth: int, rank: int) -> float:
        """Return the rate at a depth and rank; close to that of the depth above until known."""
        assumed = self.rate(depth - 1, rank) if depth else self.FIRST / 2.0**rank
        seen = self._seen.get((depth, rank))
        return assumed if seen is None else seen.toward(assumed, self.BELIEVED)

    def learn(
        self, asked: Shape, offered: Sequence[int], ranks: Sequence[int], shift: Shift
    ) -> None:
        """Learn from a round. `offered`, `ranks`: see `Round`."""
        for depth, children in enumerate(offered):
            accepted = ranks[depth] if depth < len(ranks) else None
            if not children and depth < asked.depth:
                children = 1  # a draft that ends early fails there
            for rank in range(children if accepted is None else accepted + 1):
                shift.learn(self.rate(depth, rank), rank == accepted)
                self._seen.setdefault((depth, rank), Mean(limit=300)).add(rank == accepted)

    def tokens(self, shapes: Iterable[Shape], shift: Shift) -> list[float]:
        """Return the expected tokens of a round of each shape: 1 + Σ over depths d of Π over depths
        up to d of P(a child is accepted).
        """
        refused: dict[tuple[int, int], float] = {}
        totals = []
        for shape in shapes:
            expected = reached = 1.0
            for depth, branches in enumerate(shape.branches):
                for rank in range(branches):
                    if (depth, rank + 1) not in refused:
                        refusal = 1 - shift.of(self.rate(depth, rank))
                        refused[depth, rank + 1] = refused.get((depth, rank), 1.0) * refusal
                reached *= 1 - refused[depth, branches]
                expected += reached
            totals.append(expected)
        return totals


class Repetition:
    """Acceptance rates of look-up tokens by the length of the match before them.

    An accepted token makes the match one token longer, so one table serves all depths.
    """

    # longer matches count as this long
    LONGEST = 16
    # initial rate for a match of two tokens, increment per further token, weight in tokens
    SHORT = 0.4
    LONGER = 0.05
    BELIEVED = 8.0
    # tokens reached less often are not counted: most matches are not worth the time
    HARDLY = 0.05

    def __init__(self) -> None:
        # matches that a draft extends beyond the longest share one rate
        rates = [min(self.SHORT + self.LONGER * (n - 2), 0.95) for n in range(self.LONGEST)]
        self._rates = [Mean(rate, self.BELIEVED, 300) for rate in rates]
        self._rates += [Mean(0.95, self.BELIEVED, 300)] * self.LONGEST

    def learn(self, matched: int, accepted: list[bool], shift: Shift) -> None:
        """Learn from a look-up. `accepted`: whether each token was, up to the first rejection."""
        for rate, is_accepted in zip(
            self._rates[min(matched, self.LONGEST) :], accepted, strict=False
        ):
            shift.learn(rate.value, is_accepted)
            rate.add(is_accepted)

    def tokens(self, matched: int, depth: int, shift: Shift) -> list[float]:
        """Return the expected tokens of rounds with chains of 0, 1, … `depth` tokens."""
        expected = reached = 1.0
        totals = [expected]
        matched = min(matched, self.LONGEST)
        for rate in self._rates[matched : matched + depth]:
            reached *= shift.of(rate.value)
            if reached < self.HARDLY:
                break
            expected += reached
            totals.append(expected)
        return totals + [expected] * (depth + 1 - len(totals))
