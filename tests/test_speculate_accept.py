"""Rejection sampling leaves the target's distribution alone, whatever the drafter draws from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edge.runtime.speculate.accept import Uniform, accept, draw, residual
from edge.runtime.speculate.draft import Distribution, Draft
from tests.markov_models import VOCAB, deviation

ROUNDS = 20_000
Accept = Callable[[Draft, Callable[[int], Distribution], Uniform], tuple[int, int]]


def accept_chain(
    draft: Draft, target: Callable[[int], Distribution], uniform: Uniform
) -> tuple[int, int]:
    """How many stand, and the token after them; `target(i)` is what follows the first i tokens."""
    path, following = accept(draft, lambda node: target(node + 1), uniform)
    assert path == [*range(len(path))]
    return len(path), following


def _table(seed: int, sharpness: float, zeros: int) -> list[Distribution]:
    """For each previous token, the distribution of the next; `zeros` tokens cannot be drawn."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(VOCAB):
        ids = rng.permutation(VOCAB)[: VOCAB - zeros]
        weights = np.exp(sharpness * rng.standard_normal(len(ids)))
        rows.append(Distribution(ids, weights / weights.sum()))
    return rows


def _dense(p: Distribution) -> np.ndarray:
    out = np.zeros(VOCAB)
    out[p.ids] = p.probabilities
    return out


def _pairs(accept: Accept, p: list[Distribution], q: list[Distribution], chosen: bool) -> float:
    """Rounds with drafts of two tokens after token 0; how far the first two that come out are from
    what the target says.
    """
    rng = np.random.default_rng(7)
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(ROUNDS):
        first = int(q[0].ids[0]) if chosen else draw(q[0], rng.random)
        second = int(q[first].ids[0]) if chosen else draw(q[first], rng.random)
        draft = Draft((first, second), (None, None) if chosen else (q[0], q[first]))
        before = (0, first, second)
        stood, following = accept(draft, lambda i, b=before: p[b[i]], rng.random)
        made = [*draft.tokens[:stood], following]
        if len(made) == 1:
            made.append(draw(p[made[0]], rng.random))
        counts[made[0], made[1]] += 1
    expected = _dense(p[0])[:, None] * np.stack([_dense(row) for row in p])
    return deviation(counts.ravel(), expected.ravel())


@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        (_table(1, 1.0, 0), _table(2, 1.0, 0)),
        (_table(3, 2.0, 2), _table(4, 0.5, 0)),  # the target cannot draw all that is drafted
        (_table(5, 0.5, 0), _table(6, 2.0, 3)),  # the drafter never says some tokens
        (_table(8, 1.0, 0), _table(8, 1.0, 0)),  # nothing is refused
    ],
    ids=["both", "narrow target", "narrow drafter", "equal"],
)
def test_two_tokens_are_distributed_as_the_target_says(
    p: list[Distribution], q: list[Distribution], chosen: bool
) -> None:
    assert abs(_pairs(accept_chain, p, q, chosen)) < 4.5


def _without_residual(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: after a refusal, draw from p itself."""
    for index, (token, q) in enumerate(zip(draft.tokens, draft.drawn_from, strict=True)):
        if u() >= target(index).of(token) / (1.0 if q is None else q.of(token)):
            return index, draw(target(index), u)
    return len(draft.tokens), draw(target(len(draft.tokens)), u)


def _one_position_late(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: the next token from the distribution after the refused one."""
    stood, following = accept_chain(draft, target, u)
    return stood, following if stood == len(draft.tokens) else draw(target(stood + 1), u)


def _always(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: whatever the target can draw stands."""
    for index, token in enumerate(draft.tokens):
        if not target(index).of(token):
            return index, draw(target(index), u)
    return len(draft.tokens), draw(target(len(draft.tokens)), u)


@pytest.mark.parametrize("planted", [_without_residual, _one_position_late, _always])
def test_a_planted_bug_turns_the_test_red(planted: Accept) -> None:
    assert abs(_pairs(planted, _table(1, 1.0, 0), _table(2, 1.0, 0), False)) > 10


def test_residual_of_distributions_over_different_tokens() -> None:
    p = Distribution(np.array([4, 1, 3]), np.array([0.5, 0.3, 0.2]))
    q = Distribution(np.array([3, 0, 1]), np.array([0.1, 0.5, 0.4]))
    rest = residual(p, 1, q)
    assert rest.ids.tolist() == [4, 3]
    np.testing.assert_allclose(rest.probabilities, [0.5 / 0.6, 0.1 / 0.6])
    rest = residual(p, 3, None)
    assert rest.ids.tolist() == [4, 1]
    np.testing.assert_allclose(rest.probabilities, [0.5 / 0.8, 0.3 / 0.8])


def test_greedy_uses_no_random_number() -> None:
    def never() -> float:
        raise AssertionError("a random number was drawn")

    single = [Distribution(np.array([token]), np.ones(1)) for token in (3, 1, 4)]
    draft = Draft((3, 1), (None, None))
    assert accept_chain(draft, single.__getitem__, never) == (2, 4)
    assert accept_chain(Draft((3, 5), (None, None)), single.__getitem__, never) == (1, 1)
    assert accept_chain(Draft((0,), (None,)), single.__getitem__, never) == (0, 3)
