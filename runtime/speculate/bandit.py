"""Finding the shape of drafts that is quickest, and who drafts them, or that none is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge.runtime.speculate.estimates import Acceptance, Costs, Mean, Repetition, Shift
from edge.runtime.speculate.policy import Outlook, Policy, Round
from edge.runtime.speculate.shape import LOOK_UP, NO_DRAFT, Shape


class Lessons:
    """What was learned in answers of one temperature, or of all above 0.

    Attributes:
        found: of rounds in which a model was asked, whether it had something to say.
    """

    # weight of a pull after one more round
    MEMORY = 0.997

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.repetition = Repetition()
        self.found = Mean(1.0, 1.0)
        # pulls weigh more and more, instead of all earlier ones less and less
        self._weight: dict[Shape, float] = {}
        self._now = 1.0

    def pull(self, arm: Shape) -> None:
        self.passed(1)
        self._weight[arm] = self._weight.get(arm, 0.0) + self._now

    def passed(self, rounds: int) -> None:
        """Pulls before these rounds count less."""
        self._now /= self.MEMORY**rounds
        if self._now > 1e100:
            self._weight = {arm: weight / self._now for arm, weight in self._weight.items()}
            self._now = 1.0

    def pulls(self, arms: Sequence[Shape]) -> float:
        """How often these were pulled, of which what is long ago counts less."""
        return sum(self._weight.get(arm, 0.0) for arm in arms) / self._now

    def assumed(self) -> float:
        """Of one pull of each before anything was tried, what still counts."""
        return 1 / self._now


class Experience:
    """What all sessions of a target and a drafter have learned. Threads may share it: what two of
    them write at the same moment is lost once, of one of them.
    """

    def __init__(self, run: float = Costs.run) -> None:
        """`run`: about what a run of the drafting model costs, in steps of the target."""
        self.costs = Costs(run)
        self.greedy = Lessons()
        self.sampled = Lessons()


class Bandit(Policy):
    """Takes the arm whose tokens are expected to be cheapest: a look-up's drafts, a model's, or no
    draft, which costs a step.

    Mamba Drafters, section 3.2, pulls each arm once and then goes by the mean reward
    r = -(1/N + λ·γ/N) of its rounds (equation 2) and a bonus for arms that were seldom pulled
    (equation 1). Here -r is predicted, for arms that were never pulled too, from what all rounds
    have shown of acceptance and of costs (`estimates`): a round's expected seconds by its expected
    tokens. The bonus is for arms of a model alone: what a look-up would have said is compared with
    what came, whether it was asked or not.

    Attributes:
        arms: the shapes, `NO_DRAFT` first.
        pulls: how often each was chosen, all told.
    """

    # how much cheaper than predicted a model's arm may be after one pull, and how much cheaper than
    # a step any has to be: of many arms the one that looks best is seldom as good, and what gains
    # less on the average costs the slowest answers more (simulated on 760 recorded ones)
    DOUBT = 0.12
    GAIN = 1.1
    # of a pull, for each other arm of a model
    SHARED = 0.1
    # after so many rounds with drafts a step is taken, for all is compared with it: the first time,
    # and at most; twice as many each time, as long as it takes about what it took before
    SOON, LATE, ABOUT = 16, 64, 0.2
    # a drafting model that has to read many tokens is asked more than once afterwards
    AT_ONCE = 8
    OFTEN = 3.0
    # rounds after which the prices of a model's drafts are computed anew, which takes 40 µs; a
    # round of a model counts as FRESH of them once it was asked OFTEN_ASKED times
    REFRESHED = 16
    FRESH = 6
    OFTEN_ASKED = 12
    # rounds without drafts that may pass unasked, REFRESHED at most: at least, and for each step
    # that the cheapest draft of a model costs more than one
    REST, RESTS = 1, 80

    def __init__(
        self, arms: Sequence[Shape], experience: Experience | None = None, exact: bool = True
    ) -> None:
        """`experience`: of earlier sessions, which this one adds to. `exact`: whether a token
        stands just where the target says it.
        """
        self.arms = (NO_DRAFT, *(arm for arm in dict.fromkeys(arms) if arm.nodes))
        self.pulls = dict.fromkeys(self.arms, 0)
        self._look_ups = sorted(
            (arm for arm in self.arms[1:] if arm.source == LOOK_UP), key=lambda arm: arm.depth
        )
        self._models = [arm for arm in self.arms[1:] if arm.source != LOOK_UP]
        self._experience = Experience() if experience is None else experience
        self._exact = exact
        self._prices: list[tuple[Shape, float, float]] = []
        self._copies: list[tuple[Shape, int, float]] = []
        self._unseen, self._due = 0, self.SOON
        # rounds that may pass unasked, and those that have, and their seconds
        self._rest, self._rested, self._rested_s = 0, 0, 0.0
        self._lessons, self._drafting = self._experience.greedy, Shift()
        self._stale = self.REFRESHED
        self.begin(True)

    def begin(self, greedy: bool) -> None:
        """See `Policy.begin`: what was usual before is expected again."""
        if self._rested:
            self._woken()
        self._rest = self._refused = 0
        self._greedy = greedy
        lessons = self._experience.greedy if greedy else self._experience.sampled
        if lessons is not self._lessons or self._drafting.moved:
            self._stale = self.REFRESHED
        self._lessons = lessons
        self._copying, self._drafting = Shift(), Shift()
        self._copies, self._after_run = [], False

    def choose(self, outlook: Outlook) -> Shape:
        if self._rested:
            self._woken()
        costs = self._experience.costs
        if costs.step.count < Mean.FEW or self._unseen >= self._due:
            return NO_DRAFT
        best, lowest = NO_DRAFT, costs.step.value
        if outlook.found and self._look_ups:
            best, lowest = self._looking_up(outlook, lowest)
        if self._stale >= self.REFRESHED:
            self._prices = self._priced()
            self._stale = 0
        more = outlook.behind - 1
        read = costs.read * (min(more, self.AT_ONCE) + max(0, more - self.AT_ONCE) / self.OFTEN)
        least, cheapest = math.inf, NO_DRAFT
        for arm, seconds, tokens in self._prices:
            price = (seconds + read) / tokens
            if price < least:
                least, cheapest = price, arm
        if least < lowest:
            return cheapest
        if best is NO_DRAFT:
            # the further a model is from being worth it, the longer it will not be
            rest = self.RESTS * (least / lowest - 1)
            self._rest = int(min(max(rest, self.REST), self.REFRESHED))
            self._refused = outlook.matched
        return best

    def rests(self, outlook: Outlook) -> bool:
        """See `Policy.rests`: where neither a look-up nor a model's drafts are worth a run, a
        session that could draft is to be as quick as one that cannot. Sampled text seldom goes on
        as before: there a match no longer than one that was not worth it is not worth it either.
        """
        if self._rest <= 0 or outlook.matched > (0 if self._greedy else self._refused):
            return False
        self._rest -= 1
        return True

    def rested(self, seconds: float) -> None:
        """See `Policy.rested`."""
        costs = self._experience.costs
        if self._after_run:
            seconds, self._after_run = costs.learn_after(seconds), False
        self._rested += 1
        self._rested_s += min(seconds, Mean.OUTLIER * costs.step.value)

    def _woken(self) -> None:
        """Take in the rounds that have passed unasked, all at once."""
        count, costs = self._rested, self._experience.costs
        seconds = self._rested_s / count
        if count > 2 * Mean.FEW and not self._as_before(seconds):
            self._forget_steps()
        costs.step.add(seconds, count)
        costs.follow()
        self._lessons.passed(count)
        self._drafting.fade(count)
        self.pulls[NO_DRAFT] += count
        self._stale += count
        self._unseen = self._rested = 0
        self._rested_s = 0.0

    def _looking_up(self, outlook: Outlook, lowest: float) -> tuple[Shape, float]:
        """(the arm, its seconds a token), if they are fewer than `lowest`."""
        if not self._copies:
            self._copies = self._copied_for()
        found, best = len(outlook.found), NO_DRAFT
        longest = min(found, self._copies[-1][1])
        tokens = self._lessons.repetition.tokens(outlook.matched, longest, self._copying)
        for arm, depth, seconds in self._copies:
            if depth > found:
                break
            price = seconds / tokens[depth]
            if price < lowest:
                best, lowest = arm, price
        return best, lowest

    def _copied_for(self) -> list[tuple[Shape, int, float]]:
        """Of each look-up's arm (the arm, its depth, expected seconds of a round)."""
        costs, pulled = self._experience.costs, self._lessons.pulls(self._look_ups)
        found = []
        for arm in self._look_ups:
            seconds = costs.look_up.value + costs.verify(True, arm.depth)
            seconds *= self.GAIN if self._exact else self._doubted(arm, pulled)
            found.append((arm, arm.depth, seconds))
        return found

    def _priced(self) -> list[tuple[Shape, float, float]]:
        """Of each arm of a model (the arm, expected seconds of a round, expected tokens)."""
        costs, lessons = self._experience.costs, self._lessons
        found, pulled = lessons.found.value, lessons.pulls(self._models)
        silent = (1 - found) * (costs.in_vain.value + costs.step.value)
        prices = []
        every = lessons.acceptance.tokens(self._models, self._drafting)
        for arm, tokens in zip(self._models, every, strict=True):
            seconds = silent + found * (costs.draft(arm) + costs.verify(arm.chain, arm.nodes))
            prices.append((arm, seconds * self._doubted(arm, pulled), found * tokens + 1 - found))
        return prices

    def _doubted(self, arm: Shape, pulled: float) -> float:
        """What a price is multiplied by. `pulled`: how often this arm or one like it was."""
        own = self._lessons.pulls((arm,))
        pulls = self._lessons.assumed() + own + self.SHARED * (pulled - own)
        return max(0.0, self.GAIN - self.DOUBT / math.sqrt(max(pulls, 1e-4)))

    def learn(self, done: Round) -> None:
        arm, lessons = done.asked, self._lessons
        self.pulls[arm] += 1
        if done.nodes:
            lessons.pull(arm)
            self._learn_run(done)
        else:  # a model that had nothing to say has shown nothing of its drafts
            lessons.passed(1)
            self._learn_step(done.verify_s)
        self._stale += 1
        if stood := self._copied(done):
            lessons.repetition.learn(done.outlook.matched, stood, self._copying)
        if arm.nodes and arm.source != LOOK_UP:
            self._experience.costs.learn_draft(done)
            lessons.found.add(done.nodes > 0)
            if done.nodes:
                lessons.acceptance.learn(done, self._drafting)
            often = lessons.pulls((arm,)) > self.OFTEN_ASKED
            self._stale += self.FRESH if often else self.REFRESHED
        else:
            self._drafting.fade()
            # what a run of so many tokens costs is known better
            if arm.nodes or self._stale >= self.REFRESHED:
                self._copies = []

    def _learn_run(self, done: Round) -> None:
        costs = self._experience.costs
        if self._after_run:
            costs.after.add(0.0)
        costs.learn_run(done)
        self._unseen += 1
        self._after_run = True

    def _learn_step(self, seconds: float) -> None:
        """Notice that the machine has become quicker or slower since the steps that are known."""
        costs = self._experience.costs
        if self._after_run:
            seconds = costs.learn_after(seconds)
        if self._unseen >= self._due:
            self._due = min(2 * self._due, self.LATE) if self._as_before(seconds) else self.SOON
            self._forget_steps()
        costs.step.add_seconds(seconds)
        self._unseen, self._after_run = 0, False

    def _as_before(self, seconds: float) -> bool:
        """Whether a step takes about what it took before."""
        known = self._experience.costs.step.value
        return abs(seconds - known) < self.ABOUT * known

    def _forget_steps(self) -> None:
        """Those known are old: a few new ones are to count more."""
        step = self._experience.costs.step
        step.count = min(step.count, Mean.FEW - 1.0)

    def _copied(self, done: Round) -> list[bool]:
        """Which tokens of a look-up stood, or would have, up to the first that did not."""
        if done.nodes and done.asked.source == LOOK_UP:
            stood = len(done.ranks)
            return [True] * stood + [False] * (stood < done.nodes)
        if not self._exact:
            return []
        same = [a == b for a, b in zip(done.outlook.found, done.came, strict=False)]
        return same[: same.index(False) + 1] if False in same else same
