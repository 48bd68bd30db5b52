"""The bandit over draft shapes, against drafters of known acceptance and cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from edge.runtime.speculate.choose import ARMS as TREES
from edge.runtime.speculate.choose import Ucb
from edge.runtime.speculate.estimates import Acceptance, Shift
from edge.runtime.speculate.policy import NO_OUTLOOK, Bandit, Round
from edge.runtime.speculate.shape import NO_DRAFT, Shape

CHAINS = tuple(Shape.of_chain(length) for length in (1, 2, 3, 4, 6))
ARMS = (*CHAINS, Shape((2, 1)), Shape((2, 1, 1, 1)), Shape((3, 2, 1)))


@dataclass(frozen=True)
class World:
    """A pair of models whose step takes a second.

    Attributes:
        accepted: acceptance probability of a first child at depth 0; at each depth it is multiplied
        by `deeper`, and by `sibling` for each rejected child before it.
        run, sequence: seconds of a drafter's run, and of each additional sequence.
        token: seconds that an additional token adds to the target's run, times `tree` in trees.
    """

    accepted: float
    run: float
    token: float
    deeper: float = 0.95
    sibling: float = 0.5
    sequence: float = 0.15
    tree: float = 1.0

    def rate(self, depth: int, rank: int) -> float:
        return self.accepted * self.deeper**depth * self.sibling**rank

    def seconds(self, shape: Shape) -> tuple[float, float]:
        if not shape.nodes:
            return 0.0, 1.0
        batches = (1, *shape.widths[:-1])
        drafting = sum(self.run * (1 + self.sequence * (batch - 1)) for batch in batches)
        return drafting, 1 + self.token * shape.nodes * (1.0 if shape.chain else self.tree)

    def tokens(self, shape: Shape) -> float:
        expected = reached = 1.0
        for depth, branches in enumerate(shape.branches):
            rates = [1 - self.rate(depth, rank) for rank in range(branches)]
            reached *= 1 - float(np.prod(rates))
            expected += reached
        return expected

    def price(self, shape: Shape) -> float:
        """Return the mean seconds per token."""
        return sum(self.seconds(shape)) / self.tokens(shape)

    def play(self, shape: Shape, rng: np.random.Generator) -> Round:
        offered, ranks = [], []
        for depth, branches in enumerate((*shape.branches, 0)):
            offered.append(branches)
            stood = [r for r in range(branches) if rng.random() < self.rate(depth, r)]
            if not stood:
                break
            ranks.append(stood[0])
        late = 1 + 0.1 * rng.exponential(size=2)
        drafting, verifying = self.seconds(shape)
        return Round(shape, shape.nodes, tuple(offered), tuple(ranks),
                     drafting * late[0], verifying * late[1])  # fmt: skip


PAYS = World(0.8, run=0.1, token=0.05)
TREES_PAY = World(0.55, run=0.05, token=0.01, deeper=0.9, sibling=0.8, sequence=0.05)
TREES_ARE_DEAR = World(0.7, run=0.1, token=0.03, sequence=0.6, tree=4.0)
SHORT_ONES_PAY = World(0.6, run=0.25, token=0.1, deeper=0.9)
NEVER = World(0.8, run=1.0, token=0.3, deeper=0.9)
SELDOM_RIGHT = World(0.3, run=0.3, token=0.1)
DEAR_AND_POOR = World(0.6, run=0.6, token=0.15)
DRAFT = [PAYS, TREES_PAY, TREES_ARE_DEAR, SHORT_ONES_PAY]
PLAIN = [NEVER, SELDOM_RIGHT, DEAR_AND_POOR]


def best_of(world: World) -> Shape:
    return min((NO_DRAFT, *ARMS), key=world.price)


def play(bandit: Bandit, world: World, rounds: int, seed: int) -> float:
    """Return seconds per token over some rounds, by expected tokens: luck is not regret."""
    rng = np.random.default_rng(seed)
    seconds = tokens = 0.0
    for _ in range(rounds):
        shape = NO_DRAFT
        if bandit.rests(NO_OUTLOOK):
            bandit.rested(world.play(shape, rng).verify_s)
        else:
            shape = bandit.choose(NO_OUTLOOK)
            bandit.learn(world.play(shape, rng))
        seconds, tokens = seconds + sum(world.seconds(shape)), tokens + world.tokens(shape)
    return seconds / tokens


def _regrets(world: World, rounds: int, warm: int = 0) -> list[float]:
    found = []
    for seed in range(8):
        bandit = Bandit(ARMS)
        if warm:
            play(bandit, world, warm, seed + 100)
        found.append(play(bandit, world, rounds, seed) / world.price(best_of(world)) - 1)
    return found


@pytest.mark.parametrize("world", DRAFT)
def test_200_rounds_cost_little_more_than_those_of_the_best_shape(world: World) -> None:
    """Never drafting would cost 18 % more where that matters least."""
    assert world.price(NO_DRAFT) > 1.18 * world.price(best_of(world))
    # shapes with little gain are tried late, since they mostly gain nothing
    assert np.mean(_regrets(world, 200)) < (0.15 if world is SHORT_ONES_PAY else 0.1)


@pytest.mark.parametrize("world", DRAFT)
def test_what_is_chosen_most_is_mostly_as_good_as_the_best(world: World) -> None:
    good = 0
    for seed in range(12):
        bandit = Bandit(ARMS)
        play(bandit, world, 400, seed)
        most = max(bandit.pulls, key=bandit.pulls.__getitem__)
        good += world.price(most) < 1.2 * world.price(best_of(world))
    assert good > 9


def test_where_drafting_never_pays_most_rounds_are_not_asked_about() -> None:
    bandit, rng, asked = Bandit(ARMS), np.random.default_rng(1), 0
    bandit.begin(True)
    for _ in range(400):
        if bandit.rests(NO_OUTLOOK):
            bandit.rested(NEVER.play(NO_DRAFT, rng).verify_s)
        else:
            bandit.learn(NEVER.play(bandit.choose(NO_OUTLOOK), rng))
            asked += 1
    assert asked < 80
    bandit.begin(True)
    assert sum(bandit.pulls.values()) == 400, "those that rested are counted"
    assert not bandit.rests(NO_OUTLOOK), "an answer begins with a choice"


def test_trees_are_found_where_they_pay_and_left_alone_where_they_are_dear() -> None:
    for world, paying in ((TREES_PAY, True), (TREES_ARE_DEAR, False)):
        assert best_of(world).chain is not paying
        bandit = Bandit(ARMS)
        play(bandit, world, 300, 1)
        trees = sum(pulls for shape, pulls in bandit.pulls.items() if not shape.chain)
        assert (trees > 150) is paying


@pytest.mark.parametrize("world", PLAIN)
def test_drafting_that_never_pays_costs_little_once_that_is_known(world: World) -> None:
    assert best_of(world) is NO_DRAFT
    assert np.mean(_regrets(world, 500, warm=20)) < 0.03


@pytest.mark.parametrize("world", [*DRAFT, *PLAIN])
def test_a_short_answer_is_not_spent_on_trying(world: World) -> None:
    """The first 20 rounds of a session, with everything still to learn. Trying each shape once and
    then using the best would cost 6 to 16 % more than the best shape where drafting pays, else 36
    to 76 %.
    """
    assert np.mean(_regrets(world, 20)) < (0.08 if world in PLAIN else 0.25)


def test_it_changes_its_mind_when_the_text_does() -> None:
    bandit = Bandit(ARMS)
    play(bandit, NEVER, 300, 1)
    assert bandit.pulls[NO_DRAFT] > 280
    play(bandit, PAYS, 500, 2)
    before = bandit.pulls[NO_DRAFT]
    play(bandit, PAYS, 100, 3)
    assert bandit.pulls[NO_DRAFT] - before < 10
    play(bandit, NEVER, 300, 4)
    before = bandit.pulls[NO_DRAFT]
    play(bandit, NEVER, 100, 5)
    assert bandit.pulls[NO_DRAFT] - before > 90


def _learn(acceptance: Acceptance, done: Round) -> None:
    acceptance.learn(done.asked, done.offered, done.ranks, Shift())


def test_one_shape_tells_of_the_others() -> None:
    """Rounds of one chain predict shorter and longer ones, and trees' first children."""
    acceptance = Acceptance()
    rng = np.random.default_rng(2)
    world = World(0.8, run=0.1, token=0.05, deeper=0.9)
    for _ in range(300):
        _learn(acceptance, world.play(Shape.of_chain(4), rng))
    for length in (1, 2, 3, 4):
        chain = Shape.of_chain(length)
        [tokens] = acceptance.tokens([chain], Shift())
        assert tokens == pytest.approx(world.tokens(chain), abs=0.35)
    assert acceptance.rate(0, 0) == pytest.approx(0.8, abs=0.15)
    # never seen, assumed half as likely again
    tree, chain = acceptance.tokens([Shape((2, 1)), Shape.of_chain(2)], Shift())
    assert tree > chain
    for _ in range(300):
        _learn(acceptance, world.play(Shape((3, 1)), rng))
    assert acceptance.rate(0, 1) == pytest.approx(0.4, abs=0.2)
    assert acceptance.rate(0, 2) == pytest.approx(0.2, abs=0.2)


def test_a_draft_that_came_out_short_counts_against_longer_ones() -> None:
    acceptance = Acceptance()
    for _ in range(50):  # one token, which was accepted, of the four requested
        _learn(acceptance, Round(Shape.of_chain(4), 1, (1, 0), (0,), 0.1, 1.0))
    assert acceptance.rate(0, 0) > 0.9 and acceptance.rate(1, 0) < 0.1


def test_a_drafter_that_mostly_has_nothing_to_say_is_asked_while_asking_is_free() -> None:
    for in_vain, asked in ((0.001, True), (0.5, False)):
        bandit, rng = Bandit(CHAINS), np.random.default_rng(1)
        for _ in range(400):
            shape = bandit.choose(NO_OUTLOOK)
            if shape.nodes and rng.random() < 0.8:
                bandit.learn(Round(shape, 0, (0,), (), in_vain, 1.0))
            else:
                bandit.learn(World(0.8, run=0.001, token=0.05).play(shape, rng))
        assert (bandit.pulls[NO_DRAFT] < 200) is asked


def test_a_cold_first_step_does_not_make_drafts_look_good() -> None:
    bandit = Bandit(ARMS)
    bandit.learn(Round(NO_DRAFT, 0, (0,), (), 0.0, 20.0))
    play(bandit, NEVER, 60, 1)
    assert bandit.pulls[NO_DRAFT] > 50


def test_one_round_that_took_for_ever_is_forgotten() -> None:
    bandit = Bandit(ARMS)
    play(bandit, PAYS, 200, 1)
    best = bandit.choose(NO_OUTLOOK)
    done = PAYS.play(best, np.random.default_rng(3))
    bandit.learn(Round(best, done.nodes, done.offered, done.ranks, 1000.0, 1000.0))
    assert play(bandit, PAYS, 100, 2) < 1.15 * PAYS.price(best_of(PAYS))


@pytest.mark.parametrize(
    ("branches", "depth", "nodes", "left"),
    [
        ((3, 2, 2), 3, 21, (3, 2, 2)),
        ((3, 2, 2), 2, 99, (3, 2)),
        ((3, 2, 2), 3, 20, (3, 2)),
        ((3, 2, 2), 3, 2, (2,)),
        ((3, 2, 2), 0, 99, ()),
        ((3, 2, 2), -1, 99, ()),
        ((1, 1, 1), 3, 2, (1, 1)),
        ((1, 1, 1), 3, 0, ()),
        ((), 3, 3, ()),
    ],
)
def test_shapes_are_cut_to_the_room_there_is(
    branches: tuple[int, ...], depth: int, nodes: int, left: tuple[int, ...]
) -> None:
    shape = Shape(branches).within(depth, nodes)
    assert shape.branches == left
    assert shape.nodes <= max(0, nodes) and shape.depth <= max(0, depth)


def test_ucb_is_the_papers() -> None:
    """Equations 1 and 2 of Mamba Drafters, worked out: λ_γ = 0.2, tokens 2, 3 and 1 including the
    free one, depths 4, 5 and 6; then the first arm, twice more with 5.
    """
    ucb = Ucb(TREES, 0.2)
    for arm, accepted in ((0, 1), (1, 2), (2, 0)):
        assert ucb.choose(NO_OUTLOOK) == TREES[arm]
        ucb.learn(Round(TREES[arm], 9, (), (0,) * accepted, 1.0, 1.0))
    # -1.8/2, -2/3, -2.2/1, all with the bonus of one pull in three
    assert ucb.choose(NO_OUTLOOK) == TREES[1]
    for _ in range(2):
        ucb.learn(Round(TREES[0], 9, (), (0,) * 4, 1.0, 1.0))
    first, second = -(1.8 / 2 + 2 * 1.8 / 5) / 3, -2.0 / 3
    bonus = [0.1 * np.sqrt(2 * np.log(5) / pulls) for pulls in (3, 1)]
    assert first + bonus[0] > second + bonus[1] - 0.05
    chosen = TREES[0] if first + bonus[0] > second + bonus[1] else TREES[1]
    assert ucb.choose(NO_OUTLOOK) == chosen
    ucb.learn(Round(NO_DRAFT, 0, (), (), 0.0, 1.0))  # a step is not an arm
    assert list(ucb.pulls.values()) == [3, 1, 1]


def test_ucb_finds_the_tree_of_the_most_tokens() -> None:
    world = World(0.97, run=0.01, token=0.0, deeper=1.0, sibling=0.1)
    ucb, rng = Ucb(TREES, world.run), np.random.default_rng(0)
    for _ in range(600):
        ucb.learn(world.play(ucb.choose(NO_OUTLOOK), rng))
    assert max(TREES, key=ucb.pulls.__getitem__) == TREES[2] == min(TREES, key=world.price)
