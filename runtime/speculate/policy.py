"""Finding the shape of drafts that is quickest, and who drafts them, or that none is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edge.runtime.speculate.estimates import Acceptance, Costs, Mean, Repetition, Shift
from edge.runtime.speculate.shape import LOOK_UP, NO_DRAFT, Shape


class Outlook(NamedTuple):
    """What is known before a drafter is asked.

    Attributes:
        matched: how many tokens, up to the pending one, a look-up has found said before.
        found: what followed them then.
        behind: tokens that a drafting model has yet to read, the pending one among them.
    """

    matched: int = 0
    found: tuple[int, ...] = ()
    behind: int = 1


NO_OUTLOOK = Outlook()


class Round(NamedTuple):
    """What came of one draft, or of a plain step.

    Attributes:
        asked: the shape that was asked for; `NO_DRAFT` for a step.
        nodes: tokens that were drafted; 0 where the drafter had nothing to say.
        offered: children of the root, and of every node that was accepted.
        ranks: which of them were accepted, depth by depth: 0 is the first that was drawn. One token
            more came out of the round than these.
        draft_s, verify_s: seconds in the drafter, and in the target's run and what it took to
            choose by it.
        outlook: what was known before.
        came: the tokens that came out of it.
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
    """Chooses the shape of the next draft and learns from how the round went."""

    def begin(self, greedy: bool) -> None:
        """An answer begins; `greedy`: at temperature 0."""
        return

    def choose(self, outlook: Outlook) -> Shape:
        """What to draft; `NO_DRAFT` is a plain step."""
        ...

    def learn(self, done: Round) -> None:
        """A round that was not cut short by the end of an answer."""
        return

    def rests(self, outlook: Outlook) -> bool:
        """Whether a step is to be taken without choosing or learning; `rested` says how long it
        took.
        """
        return False

    def rested(self, seconds: float) -> None:
        """All of a round that `rests` has said to pass."""
        return


class Fixed(Policy):
    """The same shape in every round."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def choose(self, outlook: Outlook) -> Shape:
        return self._shape


class Lessons:
    """What was learned in answers of one temperature, or of all above 0.

    Attributes:
        found: of rounds in which a model was asked, whether it had something to say.
        pulls: how often each arm was chosen, of which what is long ago counts less; once each
            before anything was tried.
        passed: rounds since `fade`.
    """

    # weight of a pull after one more round
    MEMORY = 0.997

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.repetition = Repetition()
        self.found = Mean(1.0, 1.0, 300)
        self.pulls: dict[Shape, float] = {}
        self.passed = 0
        self._assumed = 1.0

    def fade(self) -> float:
        """Let pulls before the rounds that have passed count less: what becomes of each."""
        kept, self.passed = self.MEMORY**self.passed, 0
        self._assumed *= kept
        # a copy: another thread may pull an arm for the first time meanwhile
        self.pulls = {arm: kept * pulls for arm, pulls in self.pulls.copy().items()}
        return kept

    def known(self, arm: Shape, others: float) -> float:
        """How often an arm was pulled, and a little of how often others like it were."""
        own = self.pulls.get(arm, 0.0)
        return self._assumed + own + 0.1 * (others - own)


class Experience:
    """What all sessions of a target and a drafter have learned. Threads may share it: what two of
    them write at the same moment is lost once, of one of them.
    """

    def __init__(self, run: float = 0.3) -> None:
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
    have shown of acceptance and of costs (`estimates`): a round's expected steps by its expected
    tokens. The bonus is for arms of a model alone: what a look-up would have said is compared with
    what came, whether it was asked or not.

    Attributes:
        arms: the shapes, `NO_DRAFT` first.
        pulls: how often each was chosen, all told.
    """

    # how much cheaper than predicted a model's arm may be after one pull, and how much cheaper than
    # a step any has to be: of many arms the one that looks best is seldom as good, and what gains
    # less on the average costs the slowest answers more (simulated on 760 recorded ones)
    DOUBT = 0.16
    GAIN = 1.1
    # after this many rounds with drafts a step is taken: costs are relative to it
    STEP_EVERY = 32
    # a drafting model that has to read many tokens is asked more than once afterwards
    AT_ONCE, OFTEN = 8, 3.0
    # rounds after which the arms' costs are computed again, in 40 µs; one with a draft of a
    # model counts as FRESH of them
    REFRESHED, FRESH = 16, 6
    # rounds without drafts that may pass unasked, REFRESHED at most: at least, and for each step
    # that the cheapest draft of a model costs more than one
    REST, RESTS = 1, 80

    def __init__(
        self, arms: Sequence[Shape], experience: Experience | None = None, exact: bool = True
    ) -> None:
        """`experience`: of earlier sessions, which this one adds to. `exact`: whether a token is
        accepted just where the target says it.
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
        """See `Policy.begin`: what was usual before is expected again."""
        self._wake()
        self._greedy, self._refused, self._rest = greedy, 0, 0
        self._lessons = self.experience.greedy if greedy else self.experience.sampled
        self._copying, self._drafting = Shift(), Shift()
        self._stale, self._after_run = self.REFRESHED, False

    # -- choosing --------------------------------------------------------------------------------

    def choose(self, outlook: Outlook) -> Shape:
        self._wake()
        if self._costs.step.count < Costs.FEW or self._unseen >= self.STEP_EVERY:
            return NO_DRAFT
        if self._stale >= self.REFRESHED:
            self._estimate()
        best, lowest = self._look_up(outlook) if outlook.found else (NO_DRAFT, 1.0)
        more = outlook.behind - 1
        read = min(more, self.AT_ONCE) + max(0, more - self.AT_ONCE) / self.OFTEN
        least, cheapest = math.inf, NO_DRAFT
        for arm, steps, reading, tokens in self._prices:
            price = (steps + reading * read) / tokens
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

    def _look_up(self, outlook: Outlook) -> tuple[Shape, float]:
        """(the arm, its steps a token), if they are fewer than one."""
        found, best, lowest = len(outlook.found), NO_DRAFT, 1.0
        longest = min(found, self._copies[-1][0].depth) if self._copies else 0
        tokens = self._lessons.repetition.tokens(outlook.matched, longest, self._copying)
        for arm, steps in self._copies:
            if arm.depth > found:
                break
            price = steps / tokens[arm.depth]
            if price < lowest:
                best, lowest = arm, price
        return best, lowest

    def _estimate(self) -> None:
        """What rounds of every arm cost: of look-ups (the arm, steps), of models (the arm, steps,
        those for each token that it reads first, expected tokens).
        """
        costs, lessons = self._costs, self._lessons
        costs.fade(lessons.fade())
        self._stale = 0
        later = max(0.0, costs.after.value)
        run, token = costs.verifying(True)
        others = sum(lessons.pulls.get(arm, 0.0) for arm in self._look_ups)
        self._copies = [
            (arm, (later + run + token * arm.depth)
             * (self.GAIN if self._exact else self._doubted(arm, others)))
            for arm in self._look_ups
        ]  # fmt: skip
        found = lessons.found.value
        silent = (1 - found) * (costs.in_vain.value + 1)
        others = sum(lessons.pulls.get(arm, 0.0) for arm in self._models)
        self._prices = []
        for arm, tokens in zip(
            self._models, lessons.acceptance.tokens(self._models, self._drafting), strict=True
        ):
            (one, reading), (run, token) = costs.drafting(arm.chain), costs.verifying(arm.chain)
            steps = costs.runs(arm) * one + later + run + token * arm.nodes
            doubted = self._doubted(arm, others)
            expected = found * tokens + 1 - found
            self._prices.append((arm, (silent + found * steps) * doubted, reading, expected))

    def _doubted(self, arm: Shape, others: float) -> float:
        """What a price is multiplied by. `others`: how often arms like it were pulled."""
        known = max(self._lessons.known(arm, others), 1e-4)
        return max(0.0, self.GAIN - self.DOUBT / math.sqrt(known))

    # -- resting ---------------------------------------------------------------------------------

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
        self._rested += 1
        self._rested_s += self._alone(seconds)

    def _wake(self) -> None:
        """Take in the rounds that have passed unasked, all at once."""
        if self._rested:
            self._learn_steps(self._rested_s / self._rested, self._rested)
            self._drafting.fade(self._rested)
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
        model = arm.nodes > 0 and arm.source != LOOK_UP
        if done.nodes:
            lessons.pulls[arm] = lessons.pulls.get(arm, 0.0) + 1
            if self._after_run:
                costs.after.add(0.0)
            looked_up_s = 0.0 if model else done.draft_s
            costs.learn_run(arm.chain, done.nodes, done.verify_s + looked_up_s)
            self._unseen += 1
            self._after_run = True
        else:  # a model that had nothing to say has shown nothing of its drafts
            self._learn_steps(self._alone(done.verify_s), 1)
        if accepted := self._copied(done):
            lessons.repetition.learn(done.outlook.matched, accepted, self._copying)
        if not model:
            self._drafting.fade()
            return
        self._stale += self.FRESH
        lessons.found.add(done.nodes > 0)
        if done.nodes:
            costs.learn_draft(arm, done.outlook.behind - 1, done.draft_s)
            lessons.acceptance.learn(arm, done.offered, done.ranks, self._drafting)
        else:
            costs.in_vain.add(done.draft_s / costs.step.value)

    def _alone(self, seconds: float) -> float:
        """What a step would have taken, had no verifying run come before it."""
        if not self._after_run:
            return seconds
        self._after_run = False
        return self._costs.learn_after(seconds)

    def _learn_steps(self, seconds: float, times: int) -> None:
        drafting = self._unseen >= self.STEP_EVERY
        if self._costs.learn_step(seconds, times, drafting=drafting) or not drafting:
            self._unseen = 0

    def _copied(self, done: Round) -> list[bool]:
        """Which tokens of a look-up were accepted, or would have been, up to the first that was
        not.
        """
        if done.nodes and done.asked.source == LOOK_UP:
            accepted = len(done.ranks)
            return [True] * accepted + [False] * (accepted < done.nodes)
        if not self._exact:
            return []
        same = [a == b for a, b in zip(done.outlook.found, done.came, strict=False)]
        return same[: same.index(False) + 1] if False in same else same
