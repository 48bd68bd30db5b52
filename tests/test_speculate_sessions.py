"""Speculation in sessions: the same words as without, and a state that matches the transcript."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

import edge
from edge.errors import EngineError, InputError
from edge.runtime.model import Model
from edge.runtime.parameters import SamplingParams
from edge.runtime.sampling import Sampler
from edge.runtime.session import Session
from edge.runtime.speculate.draft import Draft
from edge.runtime.speculate.model_drafter import Vocabulary
from edge.runtime.speculate.ngram import NgramDrafter
from edge.runtime.speculate.shape import Shape
from tests.session_models import bundle, model
from tests.speculate_samples import third_tokens_are_alike
from tests.speculation_models import check_same

KINDS = ["chat", "hybrid", "base"]
PROMPT = "one two three one two three one two"


@cache
def other(kind: str) -> Model:
    """Load the same bundle again: a drafter that is nearly always right."""
    return edge.load(bundle(kind), threads=1)


def _session(kind: str, draft: str, tokens: int | None = 3, **options: object) -> Session:
    drafter = {"none": None, "ngram": "ngram", "model": other(kind)}[draft]
    return model(kind).session(
        draft=drafter, draft_tokens=None if drafter is None else tokens, seed=3, **options
    )


@pytest.mark.parametrize("draft", ["ngram", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_state_are_those_without_drafting(kind: str, draft: str) -> None:
    plain, drafting = _session(kind, "none"), _session(kind, draft)
    for prompt in (PROMPT, " and one two three"):
        options = {"temperature": 0, "max_tokens": 13}
        expected = plain.generate(prompt, **options).finish()
        result = drafting.generate(prompt, **options).finish()
        assert result.tokens == expected.tokens
        assert result.text == expected.text
        assert result.finish_reason == expected.finish_reason
        check_same(plain, drafting)
    if draft == "model":
        assert result.speculation is not None
        assert result.speculation.acceptance_length > 2
        assert result.speculation.drafted <= 3 * result.speculation.rounds


@pytest.mark.parametrize("length", range(1, 9))
def test_an_answer_may_end_at_any_token_of_a_round(length: int) -> None:
    plain, drafting = _session("chat", "none"), _session("chat", "model", 5)
    for session in (plain, drafting):
        session.generate(PROMPT, temperature=0, max_tokens=length).finish()
    check_same(plain, drafting)


@pytest.mark.parametrize("after", range(1, 8))
def test_closing_in_the_middle_of_a_round(after: int) -> None:
    plain, drafting = _session("base", "none"), _session("base", "model", 4)
    sampled = []
    for session in (plain, drafting):
        generation = session.generate(PROMPT, temperature=0, max_tokens=32)
        for _ in range(after):
            next(generation)
        generation.close()
        sampled.append(generation.result.tokens)
    assert sampled[0] == sampled[1]
    check_same(plain, drafting)


def test_stop_strings_end_inside_a_round() -> None:
    text = _session("base", "none").generate(PROMPT, temperature=0, max_tokens=24).finish().text
    stop = text[7:9]
    # a string of single-byte tokens, all rewound, after those of a round
    plain, drafting = (_session("base", draft, 4, window=16) for draft in ("none", "model"))
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=24, stop=(stop,)).finish()
        for session in (plain, drafting)
    ]
    assert results[0].text == results[1].text == text[: text.index(stop)]
    check_same(plain, drafting)


def test_sampled_tokens_have_the_targets_distribution() -> None:
    sessions = [_session("chat", "none", 2), _session("chat", "model", 2)]
    third_tokens_are_alike(sessions, [5, 9, 11], 600, temperature=0.8, top_k=4)


@pytest.mark.parametrize("tokens", [2, None])
def test_look_ups_leave_a_seeded_answer_as_it_is(tokens: int | None) -> None:
    """Whatever is drafted, since the bandit depends on the clock."""
    plain, drafting = _session("chat", "none"), _session("chat", "ngram", tokens)
    # two tokens repeat; the next answer draws from the same random numbers
    options = {"logit_bias": {70: 40.0, 80: 40.0}, "max_tokens": 40}
    for prompt in (PROMPT, " and one two three"):
        expected = plain.generate(prompt, **options).finish()
        result = drafting.generate(prompt, **options).finish()
        assert result.tokens == expected.tokens
        check_same(plain, drafting)
        assert result.speculation is not None and result.speculation.accepted > 0
        assert set(result.tokens) == {70, 80}


def test_undo_after_speculation_restores_what_was() -> None:
    session, plain = _session("chat", "model"), _session("chat", "none")
    for one in (session, plain):
        one.chat("one two three", temperature=0, max_tokens=9).finish()
        one.chat("and then", temperature=0, max_tokens=9).finish()
        one.undo()
        one.chat("instead", temperature=0, max_tokens=9).finish()
    check_same(plain, session)


def test_a_drafter_reads_what_is_new_and_all_of_another_talk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, lengths = Vocabulary.read, []

    def counted(self: Vocabulary, tokens: Sequence[int]) -> list[int]:
        lengths.append(len(tokens))
        return real(self, tokens)

    monkeypatch.setattr(Vocabulary, "read", counted)
    session = _session("chat", "model")
    for text in ("one two three", "and then", "instead"):
        lengths.clear()
        session.chat(text, temperature=0, max_tokens=19).finish()
        said, held = session.tokens, session.drafting.drafter.context.tokens
        # it has not seen the last round: three drafted tokens, and the target's own one
        known = len(said) - 4
        assert tuple(held[:known]) == said[:known]
        assert max(lengths[1:]) <= 4 < lengths[0]
        if text == "and then":
            session.undo()


def test_a_failing_drafter_is_given_up_and_the_answer_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = _session("chat", "none").generate(PROMPT, temperature=0, max_tokens=12).finish()
    session = _session("chat", "model")
    drafter = session.drafting.drafter
    real, calls = drafter.propose, []

    def fails_later(*arguments: object) -> Draft:
        calls.append(1)
        if len(calls) > 1:
            raise EngineError("the logits are not finite")
        return real(*arguments)

    monkeypatch.setattr(drafter, "propose", fails_later)
    result = session.generate(PROMPT, temperature=0, max_tokens=12).finish()
    assert result.tokens == expected.tokens
    assert "not finite" in result.speculation.problem
    assert len(calls) == 2


def test_a_context_that_fills_up_ends_where_it_would_without() -> None:
    plain, drafting = _session("hybrid", "none"), _session("hybrid", "model", 5)
    results = [
        session.generate(PROMPT, temperature=0, max_tokens=200).finish()
        for session in (plain, drafting)
    ]
    assert results[0].finish_reason == results[1].finish_reason == "context"
    assert results[0].tokens == results[1].tokens


def test_refusals() -> None:
    for tokens in (0, -1, 1000):
        with pytest.raises(InputError, match="draft_tokens"):
            model("chat").session(draft="ngram", draft_tokens=tokens)


def _propose(drafter: NgramDrafter, tokens: list[int], count: int = 3) -> tuple[int, ...]:
    sampler = Sampler(SamplingParams(temperature=0))
    drafter.begin()
    drafter.outlook(tokens[:-1], tokens[-1])
    return drafter.propose(tokens[:-1], tokens[-1], Shape.of_chain(count), sampler, []).tokens


def test_ngrams_follow_the_text_and_forget_what_was_taken_back() -> None:
    drafter = NgramDrafter(7)
    assert _propose(drafter, [1, 2, 3]) == ()
    assert _propose(drafter, [1, 2, 3, 9, 1, 2]) == (3, 9, 1)
    assert _propose(drafter, [1, 2, 3, 9, 1, 2, 7, 1, 2]) == (7, 1, 2), "the latest one counts"
    assert _propose(drafter, [1, 2, 3, 9, 1, 2, 7, 1, 2], 1) == (7,)
    assert _propose(drafter, [8, 3, 9, 1, 2]) == (), "another text"
    assert _propose(drafter, [8, 3, 9, 1, 2, 3, 9]) == (1, 2, 3)


def test_a_text_that_goes_round_in_a_circle_is_taken_to_go_on_so() -> None:
    drafter = NgramDrafter(7)
    assert _propose(drafter, [5, 1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)
    assert _propose(drafter, [5, 4, 4, 4], 5) == (4, 4, 4, 4, 4)


def test_ngrams_say_beforehand_how_much_matches_and_what_followed() -> None:
    drafter = NgramDrafter(3)
    text = [7, 1, 2, 3, 4, 5, 6, 8]
    drafter.begin()
    assert drafter.outlook(text[:-1], text[-1]).found == ()
    for matched in (2, 3, 4, 5, 6):
        said = [*text, 9, *text[7 - matched : 7]]
        drafter.begin()
        outlook = drafter.outlook(said[:-1], said[-1])
        assert (outlook.matched, outlook.found) == (matched, (8, 9, said[9]))
