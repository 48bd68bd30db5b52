"""Acceptance by rank, as in MambaByte: what is accepted, the next token, and the label "lossy"."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

import numpy as np
import pytest

import edge
from edge.errors import InputError
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.session import Session
from edge.runtime.speculate.accept import EXACT, Row, Rule, Top, rule_of
from edge.runtime.speculate.draft import Draft
from tests.session_models import bundle, model, states

VOCAB = 7
GREEDY = Sampler(SamplingParams(temperature=0))
Target = Callable[[int], Row]


def _rows(rng: np.random.Generator) -> list[np.ndarray]:
    """Return rows of the root, then of each node; few distinct logits, so that there are ties."""
    return [rng.integers(0, 5, VOCAB).astype(np.float32) for _ in range(9)]


def _chain(rng: np.random.Generator) -> Draft:
    tokens = tuple(int(token) for token in rng.integers(0, VOCAB, rng.integers(1, 6)))
    return Draft(tokens, (None,) * len(tokens))


def _tree(rng: np.random.Generator) -> Draft:
    """Return a root with three children, the first of which has two, and the second one."""
    tokens = [int(token) for token in rng.permutation(VOCAB)[:3]]
    tokens += [int(token) for token in rng.permutation(VOCAB)[:2]]
    return Draft((*tokens, int(rng.integers(VOCAB))), (None,) * 6, (-1, -1, -1, 0, 0, 4))


def _target(rows: list[np.ndarray], draft: Draft, history: list[int]) -> Target:
    return lambda node: Row(rows[node + 1], history + draft.path(node))


# -- chains ----------------------------------------------------------------------------------------


def _rank(row: np.ndarray, token: int) -> int:
    """Return the rank from 1; equal logits rank by id."""
    return sorted(range(VOCAB), key=lambda i: (-row[i], i)).index(token) + 1


def _agrees_with_the_text(rule: Callable[[int], Rule]) -> bool:
    """Check the paper's sentence: c is the furthest byte such that b_1 … b_c are all among the top
    β.
    """
    rng = np.random.default_rng(1)
    for _ in range(300):
        beta, rows, draft = int(rng.integers(1, VOCAB)), _rows(rng), _chain(rng)
        c = 0
        while c < len(draft.tokens) and _rank(rows[c], draft.tokens[c]) <= beta:
            c += 1
        path, following = rule(beta).accept(draft, _target(rows, draft, []), GREEDY, ())
        if path != [*range(c)] or following != int(np.argmax(rows[c])):
            return False
    return True


class _KeepsTheOneThatFails(Top):
    """Planted: algorithm 1 as printed."""

    def accept(
        self, draft: Draft, target: Target, sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        path, _ = super().accept(draft, target, sampler, special)
        path = [*range(min(len(path) + 1, len(draft.tokens)))]
        return path, sampler(*target(len(path) - 1))


class _OneRowLate(Top):
    """Planted: look up a byte in the row after itself."""

    def accept(
        self, draft: Draft, target: Target, sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        return super().accept(draft, lambda node: target(node + 1), sampler, special)


class _CorrectsOneRowEarly(Top):
    """Planted: take the byte after the accepted ones from the row of the last of them."""

    def accept(
        self, draft: Draft, target: Target, sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        path, _ = super().accept(draft, target, sampler, special)
        return path, sampler(*target(max(len(path) - 2, -1)))


class _TiesAreFree(Top):
    """Planted: count only likelier tokens, not equal ones with a lower id."""

    def accept(
        self, draft: Draft, target: Target, sampler: Sampler, special: Collection[int]
    ) -> tuple[list[int], int]:
        path: list[int] = []
        for node, token in enumerate(draft.tokens):
            row = target(node - 1).logits
            if (row > row[token]).sum() >= self.beta:
                break
            path.append(node)
        return path, sampler(*target(len(path) - 1))


def test_what_stands_is_what_the_papers_text_says() -> None:
    assert _agrees_with_the_text(Top)


@pytest.mark.parametrize(
    "planted",
    [_KeepsTheOneThatFails, _OneRowLate, _CorrectsOneRowEarly, _TiesAreFree,
     lambda beta: Top(beta - 1), lambda beta: Top(beta + 1)],
    ids=["printed", "late", "early", "ties", "below", "above"],
)  # fmt: skip
def test_a_planted_bug_turns_it_red(planted: Callable[[int], Rule]) -> None:
    assert not _agrees_with_the_text(planted)


# -- chains and trees ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_chain, _tree])
@pytest.mark.parametrize(
    "sampling", [{}, {"repetition_penalty": 1.7}, {"logit_bias": {2: -100.0, 4: 2.0}}]
)
def test_rank_one_greedily_is_the_exact_rule(
    make: Callable[[np.random.Generator], Draft], sampling: dict[str, object]
) -> None:
    rng = np.random.default_rng(2)
    sampler = Sampler(SamplingParams(temperature=0, **sampling))  # type: ignore[arg-type]
    stood = 0
    for _ in range(200):
        rows, draft = _rows(rng), make(rng)
        target = _target(rows, draft, [1, 3])
        expected = EXACT.accept(draft, target, sampler, {6})
        assert Top(1).accept(draft, target, sampler, {6}) == expected
        stood += len(expected[0])
    assert stood > 20


@pytest.mark.parametrize("beta", [VOCAB, 10**8])
def test_a_rank_as_large_as_the_vocabulary_lets_all_stand(beta: int) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        rows, draft = _rows(rng), _chain(rng)
        path, following = Top(beta).accept(draft, _target(rows, draft, []), GREEDY, ())
        assert path == [*range(len(draft.tokens))]
        assert following == int(np.argmax(rows[len(path)]))


def test_what_cannot_be_said_does_not_stand() -> None:
    row = np.array([0, -np.inf, 1, 2, 3, 4, 5], np.float32)
    draft = Draft((0, 1), (None, None))
    assert Top(9).accept(draft, lambda node: Row(row, []), GREEDY, ()) == ([0], 6)


def test_of_siblings_the_best_ranked_stands() -> None:
    rows = [np.array(row, np.float32) for row in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 0, 1])]
    draft = Draft((1, 2, 2), (None,) * 3, (-1, -1, 1))
    target = _target([*rows[:1], rows[1], rows[1], rows[2]], draft, [])
    assert Top(3).accept(draft, target, GREEDY, ()) == ([1, 2], 3)
    assert Top(2).accept(draft, target, GREEDY, ()) == ([1], 0)


def test_a_control_token_stands_only_as_the_likeliest() -> None:
    row = np.array([3, 2, 1, 0], np.float32)
    for special, expected in (({1}, ([], 0)), ({3}, ([0], 0)), ((), ([0], 0))):
        draft = Draft((1,), (None,))
        assert Top(3).accept(draft, lambda node: Row(row, []), GREEDY, special) == expected
    draft = Draft((0,), (None,))
    assert Top(3).accept(draft, lambda node: Row(row, []), GREEDY, {0}) == ([0], 0)


@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_p": 0.1}])
def test_temperature_and_filters_are_for_the_token_after(filters: dict[str, float]) -> None:
    rng = np.random.default_rng(4)
    rows, draft = _rows(rng), Draft((1, 2, 3), (None,) * 3)
    greedy, _ = Top(4).accept(draft, _target(rows, draft, []), GREEDY, ())
    assert greedy, "something stands"
    params = SamplingParams(temperature=1.3, seed=5, **filters)  # type: ignore[arg-type]
    sampler, again = Sampler(params), Sampler(params)
    path, following = Top(4).accept(draft, _target(rows, draft, []), sampler, ())
    assert path == greedy
    assert following == again(rows[len(path)])
    assert sampler.rng.random() == again.rng.random(), "one number was drawn"


# -- sessions --------------------------------------------------------------------------------------


@cache
def demo(name: str) -> Model:
    return edge.load(name, threads=1)


@cache
def other(kind: str) -> Model:
    return edge.load(bundle(kind), threads=1)


def _fits(session: Session) -> None:
    """Check that the state is that of the tokens it claims to have consumed.

    A prompt differs from steps in the last bits, which int8 activations may round apart. One token
    less makes thirty times the difference or more.
    """
    tokens = list(session.tokens)
    expected, shorter = _after(session.model, tokens), _after(session.model, tokens[:-1])
    for name, values in states(session).items():
        apart = np.abs(values - expected[name]).max()
        assert apart <= 1e-3 * np.abs(expected[name]).max()
        assert 30 * apart <= np.abs(values - shorter[name]).max()


def _after(model: Model, tokens: list[int]) -> dict[str, np.ndarray]:
    fresh = model.session()
    fresh.generate(tokens, max_tokens=1).finish()
    return states(fresh)


@pytest.mark.parametrize("shape", [{"draft_tokens": 4}, {"draft_tree": (2, 1, 1)}])
def test_top_1_says_greedily_what_the_target_says(shape: dict[str, object]) -> None:
    plain = model("chat").session()
    lossy = model("chat").session(draft=other("chat"), accept="top-1", **shape)
    options = {"temperature": 0, "max_tokens": 14}
    expected = plain.generate("the state of", **options).finish()
    result = lossy.generate("the state of", **options).finish()
    assert result.tokens == expected.tokens
    assert result.speculation is not None and result.speculation.accept == "top-1"
    _fits(lossy)


@pytest.mark.parametrize("shape", [{"draft_tokens": 3}, {"draft_tree": (2, 1)}])
def test_everything_stands_when_the_rank_says_so(shape: dict[str, object]) -> None:
    session = model("base").session(draft=other("base"), accept="top-400", seed=1, **shape)
    for temperature in (0, 1.0):
        result = session.generate("the state of", temperature=temperature, max_tokens=13).finish()
        figures = result.speculation
        assert figures is not None and figures.problem == ""
        depth = 3 if "draft_tokens" in shape else 2
        whole = (len(result.tokens) - 1) // (depth + 1)
        assert figures.accepted >= whole * depth and figures.rounds <= whole + 1
        _fits(session)


def test_bytes_by_rank_take_fewer_runs() -> None:
    rounds = {}
    for accept in ("exact", "top-3"):
        session = demo("demo-bytes").session(
            draft=demo("demo-draft"), draft_tokens=12, accept=accept
        )
        result = session.chat("What do you like to do?", temperature=0, max_tokens=60).finish()
        figures = result.speculation
        assert figures is not None and (figures.accept, figures.problem) == (accept, "")
        rounds[accept] = figures.acceptance_length
        _fits(session)
    assert rounds["top-3"] > rounds["exact"]


# -- names -----------------------------------------------------------------------------------------


def test_rules_have_the_names_they_are_asked_for_by() -> None:
    for name in ("exact", "top-1", "top-3", "top-400"):
        assert rule_of(name).name == name
    assert model("chat").session(draft="ngram").drafting.rule is EXACT


@pytest.mark.parametrize(
    "accept", ["top-0", "top-x", "top-", "top", "", "Exact", "top--1", "top-+3", "top-1e3",
               "top-٣", "top-9999999999", 3, None],
)  # fmt: skip
def test_nonsense_is_refused(accept: str) -> None:
    with pytest.raises(InputError, match="neither exact nor top-N") as refused:
        model("chat").session(draft="ngram", accept=accept)
    assert refused.value.field == "accept" and "lossy" in refused.value.remedy
