"""Trees of drafts preserve the target's distribution: whole rounds over small vocabularies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edge.runtime.generate import Stepper
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Distribution, Logits, Sampler
from edge.runtime.speculate import accept, model_drafter
from edge.runtime.speculate.decode import Speculative
from edge.runtime.speculate.draft import Draft
from edge.runtime.speculate.policy import Fixed
from edge.runtime.speculate.shape import Shape
from tests.markov_models import (
    SPECIAL,
    VOCAB,
    TableContext,
    TableDrafter,
    dense,
    deviation,
    shares,
    table,
)

ROUNDS = 2500
FIRST = 2
# tokens tend to repeat, so that penalties matter
TARGET = table(1, 1.0) + 2 * np.eye(VOCAB, dtype=np.float32)
DRAFTER, SURE = table(2, 1.0), table(9, 4.0)
PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 0.9, "top_k": 4, "top_p": 0.9, "min_p": 0.05}
PENALIZED = {"temperature": 1.0, "repetition_penalty": 3.0, "repetition_window": 3}
# the token before a tree is its root
ONLY = np.where(np.arange(VOCAB) == FIRST, 0, -np.inf).astype(np.float32)


def _distribution(sampling: dict[str, float], last: int, said: list[int]) -> np.ndarray:
    return dense(Sampler(SamplingParams(**sampling)).distribution(TARGET[last], said))


def _pairs(
    sampling: dict[str, float],
    shape: tuple[int, ...],
    drafter: np.ndarray = DRAFTER,
    rounds: int = ROUNDS,
) -> float:
    """Return the deviation of the two tokens after the first from the target."""
    sampler = Sampler(SamplingParams(**sampling, seed=11))
    counts = np.zeros((VOCAB, VOCAB))
    for _ in range(rounds):
        context = TableContext(TARGET)
        context.tokens = [1]
        steps = Stepper(context, sampler, VOCAB, special=SPECIAL)  # type: ignore[arg-type]
        tokens = Speculative(steps, TableDrafter(drafter), Fixed(Shape(shape))).tokens(ONLY)
        made = [next(tokens) for _ in range(3)]
        counts[made[1], made[2]] += 1
    return deviation(counts.ravel(), _expected(sampling).ravel())


def _expected(sampling: dict[str, float]) -> np.ndarray:
    first = _distribution(sampling, FIRST, [1, FIRST])
    pairs = np.zeros((VOCAB, VOCAB))
    for token in range(VOCAB):
        said = [1, FIRST, *([] if token in SPECIAL else [token])]
        pairs[token] = first[token] * _distribution(sampling, token, said)
    return pairs


@pytest.mark.parametrize(
    ("sampling", "shape"),
    [(PLAIN, (3, 2)), (PLAIN, (1, 4)), (PLAIN, (6,)), (FILTERED, (3, 2)), (FILTERED, (1, 1)),
     (PENALIZED, (3, 2)), (PENALIZED, (2, 1, 2))],
)  # fmt: skip
def test_two_tokens_are_distributed_as_the_target_says(
    sampling: dict[str, float], shape: tuple[int, ...]
) -> None:
    assert abs(_pairs(sampling, shape)) < 4.5


@pytest.mark.parametrize("drafter", [TARGET, SURE], ids=["equal", "sure of itself"])
def test_whatever_the_drafter_says(drafter: np.ndarray) -> None:
    assert abs(_pairs(FILTERED, (2, 2), drafter)) < 4.5


def test_without_filters_nothing_is_left_for_a_sixth_child() -> None:
    """Every token was offered: one is accepted, or each was rejected in favour of another."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1))
    drawn = model_drafter.children(sampler, DRAFTER[0], [], 9)
    assert sorted(token for token, _ in drawn) == [*range(VOCAB)]
    for at, (token, q) in enumerate(drawn):
        assert q is not None and q.of(token) > 0 and len(shares(q)) == VOCAB - at
        assert abs(sum(shares(q).values()) - 1) < 1e-12


# -- planted bugs ----------------------------------------------------------------------------------


def test_q_before_the_filters_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from what is left of q, judged by all of it."""
    real = model_drafter.children

    def planted(
        sampler: Sampler, logits: Logits, history: Sequence[int], count: int
    ) -> list[tuple[int, Distribution | None]]:
        whole = np.exp(logits / sampler.params.temperature)
        drawn = []
        for token, q in real(sampler, logits, history, count):
            ids = np.array([*shares(q)])
            q = Distribution(ids, whole[ids])
            q.total = float(whole.sum())
            drawn.append((token, q))
        return drawn

    monkeypatch.setattr(model_drafter, "children", planted)
    assert _pairs(FILTERED, (3, 2), rounds=2 * ROUNDS) > 10


def test_q_that_still_has_the_earlier_siblings_turns_it_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = model_drafter.children

    def planted(
        sampler: Sampler, logits: Logits, history: Sequence[int], count: int
    ) -> list[tuple[int, Distribution | None]]:
        drawn = real(sampler, logits, history, count)
        return [(token, drawn[0][1]) for token, _ in drawn]

    monkeypatch.setattr(model_drafter, "children", planted)
    assert _pairs(PLAIN, (3,), SURE) > 10


def test_p_that_forgets_refused_siblings_turns_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(
        p: Distribution, siblings: list[int], draft: Draft, uniform: accept.Uniform
    ) -> tuple[int | None, Distribution]:
        rest = p
        for node in siblings:
            token, q = draft.tokens[node], draft.drawn_from[node]
            ratio = p.of(token) / (1.0 if q is None else q.of(token))
            if uniform() < ratio:
                return node, p
            rest = p.without(token) if q is None else p.minus(q)
        return None, rest

    monkeypatch.setattr(accept, "tried", planted)
    assert _pairs(PLAIN, (3, 2)) > 10


def test_penalties_of_another_path_turn_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is taken for a child of the root's first child, or for that child itself."""
    real = Draft.path

    def planted(self: Draft, node: int) -> list[int]:
        return [*self.tokens[: node >= 0], *real(self, node)[1:]]

    monkeypatch.setattr(Draft, "path", planted)
    monkeypatch.setattr(TableContext, "keep", lambda context, node, tokens: None)
    assert _pairs(PENALIZED, (3, 2), SURE) > 10
