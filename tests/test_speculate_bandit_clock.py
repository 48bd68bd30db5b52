"""A bandit on a machine that was busy while the bandit learned the cost of a step."""

from __future__ import annotations

import numpy as np
import pytest

from edge.runtime.speculate.policy import NO_OUTLOOK, Bandit, Round
from edge.runtime.speculate.shape import NO_DRAFT
from tests.test_speculate_bandit import (
    ARMS,
    DEAR_AND_POOR,
    PAYS,
    SELDOM_RIGHT,
    World,
    best_of,
    play,
)

BUSY = 3.0  # times as slow as later


def _learned_beside_other_work(world: World, seed: int, rounds: int) -> Bandit:
    bandit, rng = Bandit(ARMS), np.random.default_rng(seed)
    for _ in range(rounds):
        done = world.play(bandit.choose(NO_OUTLOOK), rng)
        bandit.learn(done._replace(draft_s=BUSY * done.draft_s, verify_s=BUSY * done.verify_s))
    return bandit


def test_drafts_that_were_slow_are_tried_again_when_steps_have_become_quick() -> None:
    """Nobody drafts while the machine is busy; the cost of drafts then says nothing about later."""
    regrets = []
    for seed in range(8):
        bandit, rng = Bandit(ARMS), np.random.default_rng(seed)
        for shape in (NO_DRAFT, NO_DRAFT, NO_DRAFT, ARMS[1]):
            done = PAYS.play(shape, rng)
            busy = BUSY if shape.nodes else 1.0
            bandit.learn(done._replace(draft_s=busy * done.draft_s, verify_s=busy * done.verify_s))
        regrets.append(play(bandit, PAYS, 200, seed) / PAYS.price(best_of(PAYS)) - 1)
    assert np.mean(regrets) < 0.25, regrets


def test_what_rounds_cost_goes_with_the_machine() -> None:
    bandit, rng = Bandit(ARMS), np.random.default_rng(1)
    play(bandit, DEAR_AND_POOR, 60, 1)
    costs = bandit.experience.costs
    chain, before = ARMS[1], costs.step.value
    ratios = [sum(costs.drafting(chain.chain)) + sum(costs.verifying(chain.chain))]
    for _ in range(60):
        if bandit.rests(NO_OUTLOOK):
            bandit.rested(DEAR_AND_POOR.play(NO_DRAFT, rng).verify_s / BUSY)
        else:
            done = DEAR_AND_POOR.play(bandit.choose(NO_OUTLOOK), rng)
            bandit.learn(done._replace(draft_s=done.draft_s / BUSY, verify_s=done.verify_s / BUSY))
    assert costs.step.value == pytest.approx(before / BUSY, rel=0.2)
    ratios.append(sum(costs.drafting(chain.chain)) + sum(costs.verifying(chain.chain)))
    assert ratios[1] == pytest.approx(ratios[0], rel=0.25)


def test_steps_that_were_slow_are_looked_at_again() -> None:
    for world in (DEAR_AND_POOR, SELDOM_RIGHT, PAYS):
        price, regrets = world.price(best_of(world)), []
        for seed in range(8):
            # drafting has just begun when the machine becomes faster
            bandit = _learned_beside_other_work(world, seed, 4)
            play(bandit, world, 150, seed + 50)
            regrets.append(play(bandit, world, 150, seed + 99) / price - 1)
        assert np.mean(regrets) < 0.04, (world, regrets)


def test_a_clock_that_stands_still_stops_nothing() -> None:
    bandit = Bandit(ARMS)
    for _ in range(100):
        if bandit.rests(NO_OUTLOOK):
            bandit.rested(0.0)
            continue
        shape = bandit.choose(NO_OUTLOOK)
        offered, ranks = (1,) * shape.depth + (0,), (0,) * shape.depth
        bandit.learn(Round(shape, shape.nodes, offered, ranks, 0.0, 0.0))
    bandit.begin(True)  # counts the ones that were not tried
    assert sum(bandit.pulls.values()) == 100
