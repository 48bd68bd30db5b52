"""The bandit with a look-up beside a model, over answers of 48 tokens: its gains and losses."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from edge.runtime.speculate.policy import Bandit, Experience, Outlook, Round
from edge.runtime.speculate.shape import LOOK_UP, NO_DRAFT, Shape

CHAINS = [Shape.of_chain(length) for length in (1, 2, 3, 4, 6)]
TREES = [Shape((2, 1)), Shape((2, 1, 1, 1)), Shape((3, 2, 1))]
LOOK_UPS = [Shape.of_chain(length, LOOK_UP) for length in (1, 2, 3, 5, 7)]
ARMS = [*CHAINS, *TREES, *LOOK_UPS]
TOKENS, PROMPT = 48, 60
# milliseconds of the target's runs by number of tokens, of a drafter's run, and of the overhead
Costs = tuple[tuple[int, ...], tuple[float, ...], float, float]
SMALL: Costs = ((1, 2, 3, 4, 5, 6, 8), (0.5, 0.6, 0.65, 0.69, 0.75, 0.81, 0.92), 0.12, 0.03)
LARGE: Costs = ((1, 2, 4, 8), (20.0, 23.0, 26.0, 34.0), 1.0, 0.03)


@dataclass(frozen=True)
class Texts:
    """A pair of models and texts for them.

    Attributes:
        accepted: median acceptance of the model's first child; answers differ by a standard
        deviation of 0.7 in its log odds.
        repeats: how often a look-up finds something; it is accepted 4 times in 10, and nearly
        always after four acceptances in a row.
        costs: see `SMALL`.
        after: milliseconds added to a step after a verifying run.
        stands: acceptance of look-ups before four acceptances in a row.
    """

    accepted: float
    repeats: float = 0.25
    costs: Costs = SMALL
    after: float = 0.0
    stands: float = 0.4

    @functools.cache  # noqa: B019  (a few texts, and each many times)
    def verify(self, nodes: int) -> float:
        counts, milliseconds, _, around = self.costs
        more = (milliseconds[-1] - milliseconds[-2]) / (counts[-1] - counts[-2])
        seconds = float(np.interp(nodes + 1, counts, milliseconds))
        return seconds + more * max(0, nodes + 1 - counts[-1]) + (around if nodes else 0)

    def draft(self, shape: Shape, behind: int) -> float:
        run = self.costs[2]
        first = run * (1 + 0.1 * min(behind - 1, 7) + 0.05 * max(0, behind - 8))
        return first + sum(run * (1 + 0.15 * (width - 1)) for width in shape.widths[:-1])

    def answer(self, bandit: Bandit, number: int, greedy: bool = True) -> float:
        """Return the speedup over plain steps; `number` identifies the answer, the same for all
        policies.
        """
        bandit.begin(greedy)
        accepted, matched, stands = self._said(number)
        rng = np.random.default_rng((number, 1))
        spent, at, behind, ran = 0.0, 1, PROMPT + 1, False
        while at < TOKENS:
            found: tuple[int, ...] = ()
            if matched[at]:
                bad = next((i for i in range(7) if not stands[at + i]), 7)
                found = (*range(at, at + bad), *[-1] * (7 - bad))
            outlook = Outlook(matched[at], found, behind)
            drawn, outliers = rng.standard_normal(2).tolist(), rng.random(2).tolist()
            noise = [
                math.exp(0.15 * one) * (3 if rare < 0.01 else 1)
                for one, rare in zip(drawn, outliers, strict=True)
            ]
            if bandit.rests(outlook):
                step = self.verify(0) + (self.after if ran else 0.0)
                spent, at, behind, ran = spent + step, at + 1, behind + 1, False
                bandit.rested(1e-3 * noise[0] * step)
                continue
            shape = bandit.choose(outlook)
            offered, ranks = [], []
            for depth, branches in enumerate((*shape.branches, 0)):
                offered.append(branches)
                if shape.source == LOOK_UP:
                    stood = [0] if depth < shape.depth and stands[at + depth] else []
                else:
                    rates = [accepted * 0.5**rank for rank in range(branches)]
                    stood = [rank for rank, rate in enumerate(rates) if rng.random() < rate]
                if not stood:
                    break
                ranks.append(stood[0])
            drafting = 0.0
            if shape.nodes and shape.source != LOOK_UP:
                drafting, behind = self.draft(shape, behind), 0
            verifying = self.verify(shape.nodes)
            if ran and not shape.nodes:
                verifying += self.after
            ran = shape.nodes > 0
            spent += drafting + verifying
            came = tuple(range(at, at + len(ranks) + 1))
            at, behind = at + len(came), behind + len(came)
            if shape.source != LOOK_UP and shape.nodes:
                behind = len(came) - min(len(ranks), shape.depth - 1)
            seconds = 1e-3 * noise[0] * drafting, 1e-3 * noise[1] * verifying
            done = Round(shape, shape.nodes, tuple(offered), tuple(ranks), *seconds, outlook, came)
            bandit.learn(done)
        return (at - 1) * self.verify(0) / spent

    @functools.cache  # noqa: B019
    def _said(self, number: int) -> tuple[float, list[int], list[bool]]:
        """Return (acceptance of the model's first child; match length at each place, 0 for none;
        whether the next token repeats too).
        """
        rng = np.random.default_rng((number, 0))
        odds = math.log(self.accepted / (1 - self.accepted)) + 0.7 * rng.standard_normal()
        matched, stands = [0] * (TOKENS + 16), [False] * (TOKENS + 16)
        length = 0
        for at in range(len(matched)):
            if not length and rng.random() < self.repeats:
                length = 2
            matched[at] = length
            stands[at] = bool(length) and rng.random() < (self.stands if length < 6 else 0.97)
            length = length + 1 if stands[at] else 0
        return 1 / (1 + math.exp(-odds)), matched, stands


def _speeds(texts: Texts, answers: range, *, arms: list[Shape] = ARMS,
            experience: Experience | None = None) -> np.ndarray:  # fmt: skip
    """Return speedups of answers, each in its own session, which share what was learned."""
    learned = experience or Experience(texts.costs[2] / texts.costs[1][0])
    return np.array([texts.answer(Bandit(arms, learned), number) for number in answers])


@pytest.mark.parametrize("costs", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("accepted", [0.2, 0.4, 0.5])
def test_what_seldom_pays_costs_the_slowest_tenth_little(accepted: float, costs: Costs) -> None:
    """Texts without repeats, and a drafter that is not good enough: there is nothing to gain,
    except a little in some answers.
    """
    texts = Texts(accepted, repeats=0.05, costs=costs)
    speeds = _speeds(texts, range(150))
    assert np.quantile(speeds, 0.1) > 0.94 and np.mean(speeds) > 0.99
    # the first three answers of each of ten processes
    assert np.mean([_speeds(texts, range(at, at + 3)) for at in range(0, 30, 3)]) > 0.96


def test_what_a_run_makes_the_next_step_cost_is_seen() -> None:
    """Look-ups that would just pay for their own runs, but not for the slower steps after them."""
    texts = Texts(0.1, repeats=0.3, after=0.25, stands=0.33)
    assert np.mean(_speeds(texts, range(200))[50:]) > 0.985
    assert np.mean(_speeds(replace(texts, after=0.0), range(200))[50:]) > 1.02


def test_a_short_match_is_passed_over_where_tokens_are_sampled_and_a_longer_one_is_not() -> None:
    for greedy in (True, False):
        experience = Experience()
        for number in range(20):
            Texts(0.1, stands=0.05).answer(Bandit(LOOK_UPS, experience), number, greedy)
        bandit, found = Bandit(LOOK_UPS, experience), tuple(range(7))
        bandit.begin(greedy)
        assert bandit.choose(Outlook(3, found)) is NO_DRAFT
        assert bandit.rests(Outlook()), "nothing is found"
        assert bandit.rests(Outlook(3, found)) is not greedy
        assert not bandit.rests(Outlook(4, found))


class Always(Bandit):
    """The best policy, known beforehand: one shape of the model, after look-ups of one length."""

    def __init__(self, own: Shape, looked_up: int) -> None:
        super().__init__([])
        self._own, self._looked_up = own, Shape.of_chain(looked_up, LOOK_UP)

    def choose(self, outlook: Outlook) -> Shape:
        return self._looked_up if outlook.found and self._looked_up.nodes else self._own

    def learn(self, done: Round) -> None:
        pass


def _fixed(texts: Texts, answers: range) -> Iterator[float]:
    for own in (NO_DRAFT, *CHAINS):
        for looked_up in (0, 1, 3, 7):
            policy = Always(own, looked_up)
            yield float(np.mean([texts.answer(policy, number) for number in answers]))


@pytest.mark.parametrize(
    "texts",
    [
        Texts(0.8),
        Texts(0.65, costs=LARGE),
        Texts(0.85, repeats=0.05),
        Texts(0.3, repeats=0.5),
        Texts(0.3, repeats=0.5, costs=LARGE),
    ],
    ids=["both", "large, both", "the model", "the look-up", "large, the look-up"],
)
def test_it_comes_close_to_the_best_that_is_fixed(texts: Texts) -> None:
    best = max(_fixed(texts, range(20, 120, 2)))
    assert best > 1.1
    speeds = _speeds(texts, range(120))
    assert np.mean(speeds[20:]) > 0.97 * best
    assert np.quantile(speeds, 0.1) > 0.95
    # the first five answers of each of ten processes
    assert np.mean([_speeds(texts, range(at, at + 5)) for at in range(0, 50, 5)]) > 0.7 * best


def test_a_look_up_beside_a_model_gains_more_than_either() -> None:
    texts = Texts(0.75, repeats=0.5)
    both, own, looked_up = (
        np.mean(_speeds(texts, range(220), arms=arms)[20:])
        for arms in (ARMS, [*CHAINS, *TREES], LOOK_UPS)
    )
    assert both > 1.07 * own and both > 1.02 * looked_up


def test_greedy_answers_say_nothing_of_sampled_ones() -> None:
    experience = Experience()
    for number in range(30):
        Texts(0.9).answer(Bandit(ARMS, experience), number, True)
        Texts(0.2).answer(Bandit(ARMS, experience), number, False)
    drafted = []
    for greedy in (True, False):
        bandit = Bandit(CHAINS, experience)
        (Texts(0.9) if greedy else Texts(0.2)).answer(bandit, 30, greedy)
        drafted.append(1 - bandit.pulls[NO_DRAFT] / sum(bandit.pulls.values()))
    assert drafted[0] > 0.9 and drafted[1] < 0.3


def test_a_later_session_knows_what_earlier_ones_have_learned() -> None:
    experience = Experience()
    first = Bandit(ARMS, experience)
    assert first.choose(Outlook()) is NO_DRAFT, "nothing is known of the machine"
    _speeds(Texts(0.9, costs=LARGE), range(20), experience=experience)
    later = Bandit(ARMS, experience)
    assert later.choose(Outlook()).nodes
    assert Bandit(ARMS).choose(Outlook()) is NO_DRAFT


def test_longer_matches_draft_more_and_unlikely_ones_nothing() -> None:
    experience = Experience()
    _speeds(Texts(0.2, repeats=0.5), range(40), experience=experience)
    bandit = Bandit(LOOK_UPS, experience)
    found = tuple(range(7))
    short, long = (bandit.choose(Outlook(matched, found)) for matched in (2, 12))
    assert long.depth == 7 and 0 < short.depth < 4
    # the continuation is three tokens long
    assert bandit.choose(Outlook(12, found[:3])).depth == 3
    assert bandit.choose(Outlook(0, ())) is NO_DRAFT
    # look-ups that are never accepted are avoided
    never = Round(NO_DRAFT, 0, (0,), (), 0.0, 0.5e-3, Outlook(2, (-1,) * 7), (1,))
    for _ in range(60):
        bandit.learn(never)
    assert bandit.choose(Outlook(2, found)) is NO_DRAFT


def test_a_model_that_has_to_read_much_first_is_not_asked_for_little() -> None:
    experience = Experience()
    _speeds(Texts(0.75, repeats=0.0), range(60), experience=experience)
    bandit = Bandit(ARMS, experience)
    assert bandit.choose(Outlook(behind=1)).nodes
    assert bandit.choose(Outlook(behind=3000)) is NO_DRAFT


def test_where_a_rule_loses_look_ups_are_judged_by_their_own_rounds() -> None:
    """By rank more tokens are accepted than the target would choose itself."""
    bandit = Bandit(LOOK_UPS, exact=False)
    for _ in range(4):
        bandit.learn(Round(NO_DRAFT, 0, (0,), (), 0.0, 1.0, Outlook(3, (5, 5, 5)), (1,)))
    outlook = Outlook(3, (5, 5, 5, 5, 5, 5, 5))
    for _ in range(40):
        arm = bandit.choose(outlook)
        ranks = (0,) * arm.depth
        bandit.learn(
            Round(arm, arm.nodes, (1,) * arm.depth + (0,), ranks, 0.0, 1 + 0.1 * arm.depth,
                  outlook, tuple(range(9, 10 + arm.depth)))
        )  # fmt: skip
    assert bandit.choose(outlook).depth == 7 and bandit.pulls[NO_DRAFT] < 30
