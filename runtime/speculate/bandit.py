"""Finding the shape of drafts that is quickest, or that none is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edge.runtime.speculate.estimates import Acceptance, Costs, Mean
from edge.runtime.speculate.policy import Policy, Round
from edge.runtime.speculate.shape import NO_DRAFT, Shape


class Bandit(Policy):
    """UCB1 over shapes, not drafting among them, that predicts what it has not tried.

    Mamba Drafters, section 3.2: each round is a pull of a multi-armed bandit with the bound of
    equation 1 and the reward of equation 2, r = -(1/N + λ·γ/N). N tokens come out of a round, the
    target's own one counted, so that it is never 0; γ tokens were drafted; λ is what a drafted
    token costs in target runs. Here both costs are measured instead of assumed: r = -(a round's
    seconds / a step's seconds) / N, which is equation 2 where a verification costs one step. Not
    to draft has r = -1 by definition.

    An answer is often shorter than it takes to try every arm. So the mean of an arm's own rounds
    counts only beside a prediction from all rounds (`estimates`), and every round counts a little
    as a pull of each arm that drafts. Whether to draft at all is decided first, with the pulls of
    all of them: where drafting does not pay, one arm now and then finds out, the cheapest, and not
    each of them.

    Attributes:
        arms: the shapes, `NO_DRAFT` first.
        pulls: how often each was chosen, all told.
    """

    # λ of the bound in equation 1; rewards here lie between -2 and -0.2, not in [0, 1]
    EXPLORATION = 0.06
    # weight of a round after one more: about the last seventy count
    MEMORY = 0.985
    # of a pull, for each other arm that drafts
    SHARED = 0.1
    # rounds of an arm against the tokens that are predicted for it
    PREDICTED = 15.0
    # plain steps after which rewards are computed anew: they change little, and it takes 30 µs
    REFRESHED = 16

    def __init__(self, arms: Sequence[Shape]) -> None:
        self.arms = (NO_DRAFT, *(arm for arm in dict.fromkeys(arms) if arm.nodes))
        self.pulls = dict.fromkeys(self.arms, 0)
        self._weight = dict.fromkeys(self.arms, 0.0)
        self._tokens = {arm: Mean() for arm in self.arms}
        self._acceptance = Acceptance()
        self._costs = Costs()
        # of rounds in which a drafter was asked: whether it had something to say
        self._found = Mean(1.0, 1.0)
        self._in_vain = Mean()
        self._rewards: dict[Shape, float] = {}

    def choose(self) -> Shape:
        drafts = self.arms[1:]
        # all is compared with steps
        if not drafts or self._costs.step.count < Mean.FEW:
            return NO_DRAFT
        total = sum(self._weight.values())
        drafted = total - self._weight[NO_DRAFT]
        if not self._rewards:
            self._rewards = {arm: self.reward(arm) for arm in drafts}
        rewards = self._rewards
        if drafted and (
            max(rewards.values()) + self._spread(drafted, total)
            < -1 + self._spread(self._weight[NO_DRAFT], total)
        ):
            return NO_DRAFT
        if not drafted:  # a chain says most about the others, and its price is known best
            return max((arm for arm in drafts if arm.chain), key=rewards.__getitem__)

        def bound(arm: Shape) -> float:
            pulls = self._weight[arm] + self.SHARED * (drafted - self._weight[arm])
            return rewards[arm] + self._spread(pulls, total)

        return max(drafts, key=bound)

    def _spread(self, pulls: float, total: float) -> float:
        return self.EXPLORATION * math.sqrt(2 * math.log(max(total, 2.0)) / max(pulls, 1e-9))

    def reward(self, arm: Shape) -> float:
        """-(seconds a token takes) / (seconds of a step), expected of the next round; a step must
        have been seen.
        """
        step = self._costs.step.value
        if not arm.nodes:
            return -1.0
        tokens = self._tokens[arm].toward(self._acceptance.tokens(arm), self.PREDICTED)
        found = self._found.value
        seconds = found * self._costs.seconds(arm) + (1 - found) * (self._in_vain.value + step)
        return -seconds / (found * tokens + 1 - found) / step

    def learn(self, done: Round) -> None:
        arm = done.asked
        for other in self.arms:
            self._weight[other] *= self.MEMORY
        self._weight[arm] += 1
        self.pulls[arm] += 1
        self._costs.learn(done)
        if arm.nodes or self._costs.step.count < Mean.LIMIT or not self.pulls[arm] % self.REFRESHED:
            self._rewards = {}
        if not arm.nodes:
            return
        self._found.add(done.nodes > 0)
        if not done.nodes:
            self._in_vain.add(done.draft_s)
            return
        self._tokens[arm].add(len(done.ranks) + 1)
        self._acceptance.learn(done)
