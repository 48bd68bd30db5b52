"""Rejection sampling preserves the target's distribution for any drafter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Distribution, Sampler
from edge.runtime.speculate.accept import EXACT, Row, Uniform, accept
from edge.runtime.speculate.draft import Draft
from tests.markov_models import VOCAB, dense, deviation

ROUNDS = 20_000
Accept = Callable[[Draft, Callable[[int], Distribution], Uniform], tuple[int, int]]


def accept_chain(
    draft: Draft, target: Callable[[int], Distribution], uniform: Uniform
) -> tuple[int, int]:
    """Return the number of accepted tokens, and the token after them; `target(i)` follows the first
    i tokens.
    """
    path, following = accept(draft, lambda node: target(node + 1), uniform)
    assert path == [*range(len(path))]
    return len(path), following


def _table(seed: int, sharpness: float, zeros: int, *, whole: bool = False) -> list[Distribution]:
    """Return the distribution of the next token for each previous one; `zeros` tokens cannot be
    drawn.

    `whole`: as weights over the whole vocabulary, otherwise over part of it in any order.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(VOCAB):
        ids = rng.permutation(VOCAB)[: VOCAB - zeros]
        weights = np.exp(sharpness * rng.standard_normal(len(ids))).astype(np.float32)
        row = np.zeros(VOCAB, np.float32)
        row[ids] = weights
        rows.append(Distribution(None, row) if whole else Distribution(ids, weights))
    return rows


def _pairs(accept: Accept, p: list[Distribution], q: list[Distribution], chosen: bool) -> float:
    """Run rounds with drafts of two tokens after token 0; return the deviation of the first two
    output tokens from the target.
    """
    rng = np.random.default_rng(7)
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(ROUNDS):
        first = 1 if chosen else q[0].draw(rng.random())
        second = 2 if chosen else q[first].draw(rng.random())
        draft = Draft((first, second), (None, None) if chosen else (q[0], q[first]))
        before = (0, first, second)
        stood, following = accept(draft, lambda i, b=before: p[b[i]], rng.random)
        made = [*draft.tokens[:stood], following]
        if len(made) == 1:
            made.append(p[made[0]].draw(rng.random()))
        counts[made[0], made[1]] += 1
    expected = dense(p[0])[:, None] * np.stack([dense(row) for row in p])
    return deviation(counts.ravel(), expected.ravel())


@pytest.mark.parametrize("chosen", [False, True], ids=["drawn", "chosen"])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        (_table(1, 1.0, 0), _table(2, 1.0, 0)),
        (_table(1, 1.0, 0, whole=True), _table(2, 1.0, 0, whole=True)),
        (_table(3, 2.0, 2), _table(4, 0.5, 0, whole=True)),  # not every drafted token can be drawn
        (_table(5, 0.5, 0, whole=True), _table(6, 2.0, 3)),  # the drafter lacks some tokens
        (_table(8, 1.0, 0), _table(8, 1.0, 0)),  # nothing is rejected
    ],
    ids=["some", "whole", "narrow target", "narrow drafter", "equal"],
)
def test_two_tokens_are_distributed_as_the_target_says(
    p: list[Distribution], q: list[Distribution], chosen: bool
) -> None:
    assert abs(_pairs(accept_chain, p, q, chosen)) < 4.5


def _without_residual(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: after a rejection, draw from p itself."""
    for index, (token, q) in enumerate(zip(draft.tokens, draft.drawn_from, strict=True)):
        if u() >= target(index).of(token) / (1.0 if q is None else q.of(token)):
            return index, target(index).draw(u())
    return len(draft.tokens), target(len(draft.tokens)).draw(u())


def _one_position_late(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: draw the next token from the distribution after the rejected one."""
    stood, following = accept_chain(draft, target, u)
    return stood, following if stood == len(draft.tokens) else target(stood + 1).draw(u())


def _always(draft: Draft, target: Callable[[int], Distribution], u: Uniform):  # type: ignore[no-untyped-def]
    """Planted: accept whatever the target can draw."""
    for index, token in enumerate(draft.tokens):
        if not target(index).of(token):
            return index, target(index).draw(u())
    return len(draft.tokens), target(len(draft.tokens)).draw(u())


@pytest.mark.parametrize("planted", [_without_residual, _one_position_late, _always])
def test_a_planted_bug_turns_the_test_red(planted: Accept) -> None:
    assert abs(_pairs(planted, _table(1, 1.0, 0), _table(2, 1.0, 0), False)) > 10


def test_what_is_left_of_one_distribution_after_another() -> None:
    """Part of the vocabulary or all of it, on either side: the same difference."""
    shares = {"p": {4: 0.5, 1: 0.3, 3: 0.2}, "q": {3: 0.1, 0: 0.5, 1: 0.4}}
    forms: dict[str, list[Distribution]] = {}
    for name, found in shares.items():
        row = np.zeros(VOCAB, np.float32)
        row[[*found]] = [7 * share for share in found.values()]
        some = Distribution(np.array([*found]), row[[*found]])
        forms[name] = [some, Distribution(None, row)]
    for p in forms["p"]:
        for q in forms["q"]:
            rest = p.minus(q)
            assert rest.weights.dtype == np.float64
            np.testing.assert_allclose(rest.weights.sum(), 0.6, rtol=1e-6)
            np.testing.assert_allclose(
                dense(rest), [0, 0, 0, 0.1 / 0.6, 0.5 / 0.6, 0], rtol=1e-6, atol=0
            )
        assert p.minus(p).total == 0
        np.testing.assert_allclose(dense(p.without(3)), [0, 0.3 / 0.8, 0, 0, 0.5 / 0.8, 0], 1e-6)
        assert (p.of(4), p.of(0)) == (pytest.approx(0.5), 0)


def test_greedy_uses_no_random_number() -> None:
    sampler = Sampler(SamplingParams(temperature=0))
    before = sampler.rng.bit_generator.state
    rows = [np.eye(VOCAB, dtype=np.float32)[token] for token in (3, 1, 4)]

    def found(*tokens: int) -> tuple[list[int], int]:
        draft = Draft(tokens, (None,) * len(tokens))
        return EXACT.accept(draft, lambda node: Row(rows[node + 1], []), sampler, ())

    assert found(3, 1) == ([0, 1], 4)
    assert found(3, 5) == ([0], 1)
    assert found(0) == ([], 3)
    assert sampler.rng.bit_generator.state == before


@pytest.mark.parametrize("stood", range(4))
def test_a_chain_is_the_tree_of_its_parents(stood: int) -> None:
    tokens, q = (4, 2, 2), (None,) * 3
    chain, tree = Draft(tokens, q), Draft(tokens, q, (-1, 0, 1))
    path = [*range(stood)]
    assert chain.outcome(path) == tree.outcome(path) == (
        (1,) * min(stood + 1, 3) + (0,) * (stood == 3), (0,) * stood
    )  # fmt: skip
    assert list(chain.children(stood - 1)) == tree.children(stood - 1)
    assert chain.path(stood - 1) == tree.path(stood - 1) == [*tokens[:stood]]
