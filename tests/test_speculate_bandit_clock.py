"""A bandit on a machine that was busy while it learned what a step costs."""

from __future__ import annotations

import numpy as np

from edge.runtime.speculate.bandit import Bandit
from edge.runtime.speculate.policy import NO_OUTLOOK
from tests.test_speculate_bandit import ARMS, DEAR_AND_POOR, PAYS, SELDOM_RIGHT, World, _best, _play

BUSY = 3.0  # times as slow as later


def _learned_beside_other_work(world: World, seed: int, rounds: int) -> Bandit:
    bandit, rng = Bandit(ARMS), np.random.default_rng(seed)
    for _ in range(rounds):
        done = world.play(bandit.choose(NO_OUTLOOK), rng)
        bandit.learn(done._replace(draft_s=BUSY * done.draft_s, verify_s=BUSY * done.verify_s))
    return bandit


def test_steps_that_were_slow_are_looked_at_again() -> None:
    for world in (DEAR_AND_POOR, SELDOM_RIGHT, PAYS):
        price, regrets = world.price(_best(world)), []
        for seed in range(8):
            # drafting has just begun when the machine becomes quicker
            bandit = _learned_beside_other_work(world, seed, 4)
            _play(bandit, world, 150, seed + 50)
            regrets.append(_play(bandit, world, 150, seed + 99) / price - 1)
        assert np.mean(regrets) < 0.04, (world, regrets)
