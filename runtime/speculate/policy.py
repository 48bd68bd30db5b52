"""Policies: they choose the shape and source of each draft, or none, to minimize time per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge.runtime.speculate.estimates import Acceptance, Costs, Mean, Repetition, Shift
from edge.runtime.speculate.shape import LOOK_UP, NO_DRAFT, Shape


class Outlook(NamedTuple):
    """What is known before a drafter is called.

    Attributes:
        matched: number of tokens, up to the pending one, for which look-up found an earlier match.
        found: tokens that followed the match.
        behind: number of tokens that a drafting model has yet to read, the pending one included.
    """

    matched: int = 0
    found: tuple[int, ...] = ()
    behind: int = 1


NO_OUTLOOK = Outlook()


class Round(NamedTuple):
    """The outcome of one draft, or of a plain step.

    Attributes:
        asked: requested shape; `NO_DRAFT` for a step.
        nodes: number of drafted tokens; 0 if the drafter proposed nothing.
        offered: number of children of the root and of every accepted node.
        ranks: rank of the accepted child at each depth, 0 for the first drawn. The round yields one
            token more than these.
        draft_s: seconds in the drafter.
        verify_s: seconds in the target's run and in acceptance.
        outlook: what was known before the round.
        came: tokens that the round yielded.
    """

    asked: Shape
    nodes: int
    offered: tuple[int, ...]
    ranks: tuple[int, ...]
    draft_s: float
    verify_s: float
    outlook: Outlook = NO_OUTLOOK
    came: tuple[int, ...] = ()


class Policy(Protocol):
    """Chooses the shape of the next draft and learns from the outcomes of rounds."""

    def begin(self, greedy: bool) -> None:
        """Start an answer; `greedy`: at temperature 0."""
        return

    def choose(self, outlook: Outlook) -> Shape:
        """Return the shape to draft; `NO_DRAFT` is a plain step."""
        ...

    def learn(self, done: Round) -> None:
        """Learn from a round that was not cut short by the end of an answer."""
        return

    def rests(self, outlook: Outlook) -> bool:
        """Return whether to take a plain step without `choose` and `learn`; `rested` must follow
        with its duration.
        """
        return False

    def rested(self, seconds: float) -> None:
        """Record the duration of a round for which `rests` returned True."""
        return


class Fixed(Policy):
    """Chooses the same shape in every round."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, outlook: Outlook) -> Shape:
        return self._shape


class Lessons:
    """What was learned in greedy answers, or in sampled ones.

    Attributes:
        acceptance: acceptance rates of a drafting model's tokens.
        repetition: acceptance rates of look-up tokens.
        found: share of a drafting model's rounds in which it proposed something.
        pulls: number of rounds of each arm, old ones weighted less.
        passed: number of rounds since `fade`.
    """

    # factor on the weight of a pull per round
    MEMORY = 0.997

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.repetition = Repetition()
        self.found = Mean(1.0, 1.0, 300)
        self.pulls: dict[Shape, float] = {}
        self.passed = 0
        self._assumed = 1.0

    def fade(self) -> float:
        """Fade pulls by the rounds passed. Return the factor applied."""
        kept, self.passed = self.MEMORY**self.passed, 0
        self._assumed *= kept
        # a copy: another thread may pull an arm for the first time meanwhile
        self.pulls = {arm: kept * pulls for arm, pulls in self.pulls.copy().items()}
        return kept

    def known(self, arm: Shape, others: float) -> float:
        """Return the weighted pulls of an arm, including one assumed initially and a tenth of those
        of similar arms.
        """
        own = self.pulls.get(arm, 0.0)
        return self._assumed + own + 0.1 * (others - own)


class Experience:
    """What all sessions of a target and a drafter have learned. Threads may share it; of concurrent
    updates one may be lost.
    """

    def __init__(self, run: float = 0.3) -> None:
        """`run`: initial cost of a run of the drafting model, in steps of the target."""
        self.costs = Costs(run)
        self.greedy = Lessons()
        self.sampled = Lessons()


class Bandit(Policy):
    """Chooses the arm with the lowest expected cost per token: a look-up draft, a model's draft, or
    a plain step.

    Mamba Drafters, section 3.2, pulls each arm once, then goes by the mean reward
    r = -(1/N + λ·γ/N) of its rounds (equation 2) and a bonus for rarely pulled arms (equation 1).
    Here -r, the expected steps of a round divided by its expected tokens, is predicted even for
    arms never pulled, from the acceptance and costs of all rounds (`estimates`). With the exact
    rule only model arms get the bonus: look-ups are compared with every round's tokens anyway.

    Attributes:
        arms: the shapes, `NO_DRAFT` first.
        pulls: total number of rounds of each arm.
    """

    # DOUBT: how much cheaper than predicted an arm may be after one pull. GAIN: how much cheaper
    # than a step an arm must be, because the arm that looks best of many is seldom as good, and
    # smaller average gains cost the slowest answers more (simulated on 760 recorded answers).
    DOUBT = 0.16
    GAIN = 1.1
    # a plain step is taken after this many rounds with drafts, since costs are relative to it
    STEP_EVERY = 32
    # a model that reads more than AT_ONCE tokens is used about OFTEN times afterwards, which share
    # the cost of the excess
    AT_ONCE, OFTEN = 8, 3.0
    # number of rounds after which the arms' costs are recomputed, which takes 40 µs; a round with a
    # model's draft counts as FRESH additional rounds
    REFRESHED, FRESH = 16, 6
    # rounds to rest: RESTS times the relative excess cost of the cheapest model draft, at least
    # REST, at most REFRESHED
    REST, RESTS = 1, 80

    def __init__(
        self, arms: Sequence[Shape], experience: Experience | None = None, exact: bool = True
    ) -> None:
        """`experience`: shared with earlier sessions and updated. `exact`: whether exactly the
        target's own tokens are accepted.
        """
        self.arms = (NO_DRAFT, *(arm for arm in dict.fromkeys(arms) if arm.nodes))
        self.pulls = dict.fromkeys(self.arms, 0)
        drafts = self.arms[1:]
        self._look_ups = sorted(
            (arm for arm in drafts if arm.source == LOOK_UP), key=lambda arm: arm.depth
        )
        self._models = [arm for arm in drafts if arm.source != LOOK_UP]
        experience = Experience() if experience is None else experience
        self._costs, self.experience = experience.costs, experience
        self._exact = exact
        self._unseen = 0  # rounds since the last step
        self._rest, self._rested, self._rested_s = 0, 0, 0.0
        self._lessons = experience.greedy
        self.begin(True)

    def begin(self, greedy: bool) -> None:
        """See `Policy.begin`. Resets the shifts of the last answer."""
        self._wake()
        self._greedy, self._refused, self._rest = greedy, 0, 0
        self._lessons = self.experience.greedy if greedy else self.experience.sampled
        self._look_up_shift, self._model_shift = Shift(), Shift()
        self._stale, self._after_run = self.REFRESHED, False

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, outlook: Outlook) -> Shape:
        self._wake()
        if self._costs.step.count < Costs.FEW or self._unseen >= self.STEP_EVERY:
            return NO_DRAFT
        if self._stale >= self.REFRESHED:
            self._estimate()
        look_up, look_up_price = self._look_up(outlook) if outlook.found else (NO_DRAFT, 1.0)
        unread = outlook.behind - 1
        read_cost = min(unread, self.AT_ONCE) + max(0, unread - self.AT_ONCE) / self.OFTEN
        lowest_price, cheapest = math.inf, NO_DRAFT
        for arm, steps, reading, tokens in self._model_prices:
            price = (steps + reading * read_cost) / tokens
            if price < lowest_price:
                lowest_price, cheapest = price, arm
        if lowest_price < look_up_price:
            return cheapest
        if look_up is NO_DRAFT:
            # the further a model's drafts are from paying off, the longer they will not
            rest = self.RESTS * (lowest_price / look_up_price - 1)
            self._rest = int(min(max(rest, self.REST), self.REFRESHED))
            self._refused = outlook.matched
        return look_up

    def _look_up(self, outlook: Outlook) -> tuple[Shape, float]:
        """Return (best look-up arm, its steps per token), or (NO_DRAFT, 1.0) if none beats 1.0."""
        available, best, lowest_price = len(outlook.found), NO_DRAFT, 1.0
        longest = min(available, self._look_up_prices[-1][0].depth) if self._look_up_prices else 0
        tokens = self._lessons.repetition.tokens(outlook.matched, longest, self._look_up_shift)
        for arm, steps in self._look_up_prices:
            if arm.depth > available:
                break
            price = steps / tokens[arm.depth]
            if price < lowest_price:
                best, lowest_price = arm, price
        return best, lowest_price

    def _estimate(self) -> None:
        """Compute the costs of all arms: for look-ups (arm, steps), for models (arm, steps, steps
        per token read first, expected tokens).
        """
        costs, lessons = self._costs, self._lessons
        costs.fade(lessons.fade())
        self._stale = 0
        after = max(0.0, costs.after.value)
        run, token = costs.verifying(True)
        others = sum(lessons.pulls.get(arm, 0.0) for arm in self._look_ups)
        self._look_up_prices = [
            (arm, (after + run + token * arm.depth)
             * (self.GAIN if self._exact else self._doubt_factor(arm, others)))
            for arm in self._look_ups
        ]  # fmt: skip
        found_rate = lessons.found.value
        no_draft = (1 - found_rate) * (costs.in_vain.value + 1)
        others = sum(lessons.pulls.get(arm, 0.0) for arm in self._models)
        self._model_prices = []
        for arm, tokens in zip(
            self._models, lessons.acceptance.tokens(self._models, self._model_shift), strict=True
        ):
            (run_cost, reading), (run, token) = (
                costs.drafting(arm.chain),
                costs.verifying(arm.chain),
            )
            steps = costs.runs(arm) * run_cost + after + run + token * arm.nodes
            doubt = self._doubt_factor(arm, others)
            expected = found_rate * tokens + 1 - found_rate
            self._model_prices.append(
                (arm, (no_draft + found_rate * steps) * doubt, reading, expected)
            )

    def _doubt_factor(self, arm: Shape, others: float) -> float:
        """Return the factor on an arm's price. `others`: pulls of all arms of its source."""
        known = max(self._lessons.known(arm, others), 1e-4)
        return max(0.0, self.GAIN - self.DOUBT / math.sqrt(known))

    # -- resting ---------------------------------------------------------------------------------

    def rests(self, outlook: Outlook) -> bool:
        """See `Policy.rests`. While no draft pays off, a session with a drafter should be as fast
        as one without. Sampled text seldom repeats: there, a match no longer than one that did not
        pay off does not end the rest.
        """
        if self._rest <= 0 or outlook.matched > (0 if self._greedy else self._refused):
            return False
        self._rest -= 1
        return True

    def rested(self, seconds: float) -> None:
        self._rested += 1
        self._rested_s += self._without_run_cost(seconds)

    def _wake(self) -> None:
        """Learn from all rested rounds at once."""
        if self._rested:
            self._learn_steps(self._rested_s / self._rested, self._rested)
            self._model_shift.fade(self._rested)
            self.pulls[NO_DRAFT] += self._rested
            self._stale += self._rested
            self._lessons.passed += self._rested
            self._rested, self._rested_s = 0, 0.0

    # -- learning --------------------------------------------------------------------------------

    def learn(self, done: Round) -> None:
        arm, costs, lessons = done.asked, self._costs, self._lessons
        self.pulls[arm] += 1
        self._stale += 1
        lessons.passed += 1
        from_model = arm.nodes > 0 and arm.source != LOOK_UP
        if done.nodes:
            lessons.pulls[arm] = lessons.pulls.get(arm, 0.0) + 1
            if self._after_run:
                costs.after.add(0.0)
            looked_up_s = 0.0 if from_model else done.draft_s
            costs.learn_run(arm.chain, done.nodes, done.verify_s + looked_up_s)
            self._unseen += 1
            self._after_run = True
        else:  # without a proposal there is nothing to learn about drafts
            self._learn_steps(self._without_run_cost(done.verify_s), 1)
        if accepted := self._look_up_accepted(done):
            lessons.repetition.learn(done.outlook.matched, accepted, self._look_up_shift)
        if not from_model:
            self._model_shift.fade()
            return
        self._stale += self.FRESH
        lessons.found.add(done.nodes > 0)
        if done.nodes:
            costs.learn_draft(arm, done.outlook.behind - 1, done.draft_s)
            lessons.acceptance.learn(arm, done.offered, done.ranks, self._model_shift)
        else:
            costs.in_vain.add(done.draft_s / costs.step.value)

    def _without_run_cost(self, seconds: float) -> float:
        """Return what a step would have taken without a verifying run before it."""
        if not self._after_run:
            return seconds
        self._after_run = False
        return self._costs.learn_after(seconds)

    def _learn_steps(self, seconds: float, times: int) -> None:
        drafting = self._unseen >= self.STEP_EVERY
        if self._costs.learn_step(seconds, times, drafting=drafting) or not drafting:
            self._unseen = 0

    def _look_up_accepted(self, done: Round) -> list[bool]:
        """Return whether each token of the look-up was, or would have been, accepted, up to the
        first that was not.
        """
        if done.nodes and done.asked.source == LOOK_UP:
            accepted = len(done.ranks)
            return [True] * accepted + [False] * (accepted < done.nodes)
        if not self._exact:
            return []
        same = [a == b for a, b in zip(done.outlook.found, done.came, strict=False)]
        return same[: same.index(False) + 1] if False in same else same
