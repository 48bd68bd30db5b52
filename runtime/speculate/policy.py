"""How many tokens to draft next: a fixed number, or what a bandit finds to be quickest.

Mamba Drafters, section 3.2: each round is a pull of a multi-armed bandit, UCB1 (equation 1) with
the reward of equation 2, r = -(1/N + λ·γ/N). N tokens come out of a round, the target's own one
counted, so that it is never 0; γ tokens were drafted; λ is what a drafted token costs in target
runs. Here both costs are measured instead of assumed: r = -(round's seconds / step's seconds) / N,
which is equation 2 where a verification costs one step. The arm "draft nothing" has r = -1 by
definition, so speculation that does not pay is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Chooses the length of the next draft and learns from how the round went."""

    def choose(self) -> int:
        """Tokens to draft; 0 is a plain step."""
        ...

    def learn(self, length: int, made: int, seconds: float) -> None:
        """A round drafted `length` tokens (0: a plain step), gave `made` and took so long."""
        ...


class Fixed:
    """The same length in every round."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self) -> int:
        return self._length

    def learn(self, length: int, made: int, seconds: float) -> None:
        pass


class Bandit:
    """UCB1 over draft lengths, 0 among them, forgetting as it goes: texts change.

    Attributes:
        arms: the lengths.
        pulls: how often each was chosen, all told.
    """

    # of the bound in equation 1; rewards here lie between -2 and -0.2, not in [0, 1]
    EXPLORATION = 0.08
    # weight of a round after one more: about the last fifty count
    MEMORY = 0.98

    def __init__(self, arms: Sequence[int]) -> None:
        self.arms = tuple(sorted({0, *arms}))
        self.pulls = dict.fromkeys(self.arms, 0)
        self._weight = dict.fromkeys(self.arms, 0.0)
        self._tokens = dict.fromkeys(self.arms, 0.0)
        self._seconds = dict.fromkeys(self.arms, 0.0)

    def choose(self) -> int:
        # the longest drafts are tried last: a step must be known before anything can be compared
        for arm in self.arms:
            if not self._weight[arm]:
                return arm
        total = sum(self._weight.values())
        return max(self.arms, key=lambda arm: self._bound(arm, total))

    def reward(self, arm: int) -> float:
        """Mean of -(cost in steps)/(tokens), by time, so that long rounds count as much."""
        step = self._seconds[0] / self._tokens[0]
        return -self._seconds[arm] / self._tokens[arm] / step

    def _bound(self, arm: int, total: float) -> float:
        spread = math.sqrt(2 * math.log(max(total, 2.0)) / self._weight[arm])
        return self.reward(arm) + self.EXPLORATION * spread

    def learn(self, length: int, made: int, seconds: float) -> None:
        # a draft may come out shorter than asked for: it counts for the arm that asked
        for table in (self._weight, self._tokens, self._seconds):
            for arm in self.arms:
                table[arm] *= self.MEMORY
        self.pulls[length] += 1
        self._weight[length] += 1
        self._tokens[length] += made
        self._seconds[length] += seconds
