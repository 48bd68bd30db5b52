"""UCB over a few trees, to the letter of Mamba Drafters, section 3.2, to compare `Bandit` with.

It learns the mean reward of every arm alone, knows neither a step without a draft nor a look-up,
and forgets at the end of a session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from edge.runtime.speculate.policy import Outlook, Policy, Round
from edge.runtime.speculate.shape import Shape

UCB: Literal["ucb"] = "ucb"
# appendix C.6, table 7
ARMS = (Shape((3, 3, 2, 1)), Shape((3, 2, 2, 1, 1)), Shape((2, 2, 2, 1, 1, 1)))


class Ucb(Policy):
    """Takes the arm of the highest mean reward and bonus, λ_UCB·√(2·ln t / n) after n of t rounds
    (equation 1); every arm once before.

    The reward of a round is -(1 + λ_γ·γ) / N (equation 2): γ is the depth of the tree, N the tokens
    that came out of the round. The paper's N are those accepted; the one that always comes is
    counted here, or a round that accepts none would have no reward.

    Attributes:
        pulls: rounds of each arm.
    """

    # not reported; about as large as arms' rewards differ
    BONUS = 0.1

    def __init__(self, arms: Sequence[Shape], run: float) -> None:
        """`run`: λ_γ, what a run of the drafting model costs, in steps of the target."""
        self.pulls = dict.fromkeys(arms, 0)
        self._rewards = dict.fromkeys(arms, 0.0)
        self._run = run

    def choose(self, outlook: Outlook) -> Shape:
        t = sum(self.pulls.values())

        def bound(arm: Shape) -> float:
            pulls = self.pulls[arm]
            if not pulls:
                return math.inf
            return self._rewards[arm] / pulls + self.BONUS * math.sqrt(2 * math.log(t) / pulls)

        return max(self.pulls, key=bound)

    def learn(self, done: Round) -> None:
        if done.asked in self.pulls:
            self.pulls[done.asked] += 1
            self._rewards[done.asked] -= (1 + self._run * done.asked.depth) / (len(done.ranks) + 1)
