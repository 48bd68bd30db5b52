"""Words drafted for a byte-level target: many bytes a round, and rewinds to the last whole word."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import edge
from edge.errors import InputError
from edge.runtime.model import Model
from edge.runtime.session import Session
from edge.runtime.speculate.draft import Draft
from edge.runtime.speculate.text_drafter import BACK, TextDrafter
from tests.speculation_models import read_lengths

PROMPTS = ("What do you like to do?", "Hello, how are you?")
Ahead = tuple[bytes, bytes, int]


@cache
def demo(name: str) -> Model:
    return edge.load(name, threads=1)


def _session(tokens: int, accept: str = "exact") -> tuple[Session, TextDrafter]:
    session = demo("demo-bytes").session(
        draft=demo("demo-draft"), draft_tokens=tokens, accept=accept
    )
    assert session.drafting is not None
    drafter = session.drafting.drafter
    assert isinstance(drafter, TextDrafter)
    return session, drafter


def _follow(drafter: TextDrafter, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Ahead], list[int]]:
    """Record of each draft (text read by the drafter, as much of the target's text, bytes drafted),
    and the number of tokens read for it.
    """
    drafts: list[Ahead] = []
    reads = read_lengths(drafter, monkeypatch)
    propose = drafter.propose

    def watched(*arguments: Any) -> Draft:
        draft = propose(*arguments)
        read, heard = (bytes(side.data[: drafter.agreed]) for side in (drafter.said, drafter.heard))
        if draft.tokens:
            drafts.append((read, heard, len(draft.tokens)))
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    return drafts, reads


def _answers(session: Session, length: int) -> list[tuple[int, ...]]:
    return [
        session.chat(prompt, temperature=0, max_tokens=length).finish().tokens for prompt in PROMPTS
    ]


@pytest.mark.parametrize("tokens", [12, 64])
def test_long_drafts_fit_into_a_run_and_are_taken_back_to_whole_words(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, drafter = _session(tokens)
    drafts, reads = _follow(drafter, monkeypatch)
    assert _answers(session, 40) == _answers(demo("demo-bytes").session(), 40)
    assert session.drafting is not None and session.drafting.window == tokens + 1
    assert all(read == heard for read, heard, _ in drafts)
    # three words of the drafter's and more, of which the target mostly rejects the last ones
    assert max(count for *_, count in drafts) >= min(tokens, 30)
    # a prompt each, then never the whole text again: it was rewound, not restarted
    assert sum(count > BACK + 12 for count in reads) <= len(PROMPTS)


def test_by_rank_the_drafter_follows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    session, drafter = _session(12, "top-3")
    drafts, reads = _follow(drafter, monkeypatch)
    _answers(session, 60)
    assert all(read == heard for read, heard, _ in drafts)
    assert sum(count > BACK + 12 for count in reads) <= len(PROMPTS)


def test_keeping_the_first_word_that_is_not_whole_turns_it_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted: c′ of MambaByte's algorithm 1 as printed."""
    session, drafter = _session(12)
    drafts, _ = _follow(drafter, monkeypatch)
    kept = drafter._kept_tokens

    def planted(most: int, end: int) -> int:
        return min(kept(most, end) + 1, len(drafter.said.tokens))

    monkeypatch.setattr(drafter, "_kept_tokens", planted)
    _answers(session, 40)
    assert any(read != heard for read, heard, _ in drafts)


@pytest.mark.parametrize("tokens", [0, 65, 10**9])
def test_more_than_a_run_may_hold_is_refused(tokens: int) -> None:
    with pytest.raises(InputError, match="from 1 to 64, not") as refused:
        _session(tokens)
    assert refused.value.field == "draft_tokens"
