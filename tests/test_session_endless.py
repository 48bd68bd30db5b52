"""Endless conversations: their memory is bounded, and the whole text is in the state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from edge.errors import InputError, StateError
from edge.runtime import prompts, transcript
from edge.runtime.session import Session
from edge.text.template import ChatTemplate, Message
from tests.session_models import CHAT, model, same_bits

SHOWN = 48
KEPT = 300  # characters


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SHOWN", SHOWN)
    monkeypatch.setattr(transcript, "KEPT", KEPT)


def say(session: Session, turn: int) -> tuple[int, ...]:
    text = f"the state of robot {turn} " * (1 + turn % 3)
    return session.chat(text, max_tokens=1 + turn % 5, temperature=0, stop="x").finish().tokens


def test_a_chat_goes_on_as_if_all_of_it_were_kept(
    short: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tokens, text and prompts stay bounded; answers and states are those of a whole transcript."""
    bounded = model("chat").session(system="be brief", max_prompt_tokens=100)
    with monkeypatch.context() as patch:
        whole = model("chat").session(system="be brief")
        for turn in range(44):
            patch.setattr(prompts, "SHOWN", 1 << 30)
            expected = say(whole, turn)
            patch.setattr(prompts, "SHOWN", SHOWN)
            assert say(bounded, turn) == expected, turn
            assert len(bounded.tokens) < 3 * SHOWN
            if turn % 10 == 7:
                bounded.undo()
                say(bounded, turn)
                bounded.regenerate(max_tokens=1 + turn % 5, temperature=0, stop="x").finish()
            if turn % 20 == 13:
                bounded.save(tmp_path / "talk")
                bounded = model("chat").session(max_prompt_tokens=100)
                assert bounded.load(tmp_path / "talk") == bounded.position
            if turn % 20 == 17:  # the whole transcript, as far as it is kept
                again = [*bounded.messages, Message("user", "so")]
                bounded.chat(again, max_tokens=1, temperature=0).finish()
                bounded.undo()
    same_bits(bounded, whole)
    assert whole.position == len(whole.tokens) > 1000
    assert sum(len(message.content) for message in bounded.messages) < 3 * KEPT
    assert bounded.messages[0] == Message("system", "be brief")
    assert bounded.messages[-9:] == whole.messages[-9:]


def test_a_text_goes_on_as_if_all_of_it_were_kept(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, bounded = (model("base").session() for _ in range(2))
    for _ in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(prompts, "SHOWN", 1 << 30)
            expected = whole.generate("robots", max_tokens=5, temperature=0).finish().tokens
        assert bounded.generate("robots", max_tokens=5, temperature=0).finish().tokens == expected
        assert len(bounded.tokens) <= 2 * SHOWN + 16
    same_bits(bounded, whole)
    assert bounded.tokens == whole.tokens[-len(bounded.tokens) :]


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafters_follow_what_is_kept(short: None, draft: str) -> None:
    options: dict[str, Any] = {"draft": model("chat") if draft == "model" else draft}
    drafting = model("chat").session(**options, draft_tokens=2)
    plain = model("chat").session()
    for turn in range(30):
        assert say(drafting, turn) == say(plain, turn)
    assert drafting.position == plain.position > len(drafting.tokens)


def test_another_transcript_is_read_from_its_beginning(short: None) -> None:
    """Also if it equals the kept part: the state holds more than that."""
    session = model("chat").session()
    for turn in range(30):
        say(session, turn)
    assert session.position > len(session.tokens)
    talk = session.snapshot().conversation
    kept = [*talk.shown, Message("user", "so")]
    assert len(kept) < len(talk.messages)
    result = session.chat(kept, max_tokens=2, temperature=0).finish()
    assert result.reused_tokens == 0
    fresh = model("chat").session()
    assert fresh.chat(kept, max_tokens=2, temperature=0).finish().tokens == result.tokens
    same_bits(session, fresh)


class Counting(ChatTemplate):
    """Numbers its turns from the end, so that every prompt is a different text."""

    def encode(self, messages: Any, **options: Any) -> list[int]:
        counted = [
            Message(message.role, f"{len(messages) - place} {message.content}")
            for place, message in enumerate(messages)
        ]
        return super().encode(counted, **options)


def test_a_template_that_renders_turns_differently_later(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest turns are dropped if the whole would be too long; the rest is read again."""
    chat = model("chat")
    monkeypatch.setattr(chat, "template", Counting(CHAT, chat.tokenizer))
    session = chat.session(max_prompt_tokens=300)
    for turn in range(40):
        say(session, turn)
        assert session.position == len(session.tokens) <= 300 + 60
    assert session.snapshot().conversation.skipped
    with pytest.raises(InputError, match="at most 300"):
        session.chat("a robot " * 400)


def test_forged_places_are_refused(short: None, tmp_path: Path) -> None:
    session = model("chat").session()
    for turn in range(20):
        say(session, turn)
    session.save(tmp_path / "talk")
    state = session.model.engine.new_state()
    extra = state.load(tmp_path / "talk")
    assert extra["forgotten"] > 0 and extra["skipped"] > 0
    for key, value in itertools.product(
        ("forgotten", "gap", "skipped"), (-1, 1 << 70, 0.5, None, "1", True)
    ):
        state.save(tmp_path / "bad", extra | {key: value})
        with pytest.raises(StateError):
            model("chat").session().load(tmp_path / "bad")
