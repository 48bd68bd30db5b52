"""Conversations: which tokens are reused, and that the state always matches the transcript."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from edge.errors import ContextFullError, EngineError, InputError, StateError
from edge.runtime.session import Session
from edge.text.template import Message
from tests.facts import facts
from tests.session_models import END, model

HOT = {"temperature": 4.0}
KINDS = ["chat", "hybrid", "bytes"]


def rendered(session: Session) -> list[int]:
    """Return the transcript as the template renders it before the next turn."""
    template = session.model.template
    assert template is not None
    return template.encode(session.messages, add_generation_prompt=False)


def agrees(session: Session) -> bool:
    """Check that the state holds the transcript up to the closing of the last turn."""
    tokens = rendered(session)
    return session.tokens == tuple(tokens[: len(session.tokens)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_runs_only_what_is_new(kind: str) -> None:
    session = model(kind).session(system="be kind", seed=1)
    held = 0
    for text in ("hello", "  <|end|> spaced\n", "bye"):
        result = session.chat(text, max_tokens=5, **HOT).finish()
        assert result.reused_tokens == held
        assert agrees(session)
        held = len(session.tokens)
        assert held == result.reused_tokens + result.prompt_tokens + len(result.tokens) - 1
    assert [m.role for m in session.messages] == ["system"] + ["user", "assistant"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_session_that_reads_everything_anew(kind: str) -> None:
    session = model(kind).session(seed=2)
    for text in ("hello", "then", "so"):
        before = session.messages
        result = session.chat(text, max_tokens=5, temperature=0).finish()
        fresh = model(kind).session().chat([*before, Message("user", text)], max_tokens=5,
                                           temperature=0).finish()  # fmt: skip
        assert fresh.reused_tokens == 0
        assert fresh.prompt_tokens == result.prompt_tokens + result.reused_tokens
        assert fresh.tokens == result.tokens


def test_an_answer_that_ends_itself_and_one_that_is_cut_are_closed_alike() -> None:
    session = model("chat").session(seed=1)  # unseeded, 1 in 100 draws a special token
    result = session.chat("hello", temperature=0, logit_bias={END: 1000.0}).finish()
    assert result.finish_reason == "stop" and result.tokens == (END,)
    assert session.messages[-1] == Message("assistant", "", ())
    result = session.chat("more", max_tokens=2, temperature=0, logit_bias={END: -1000.0}).finish()
    assert result.finish_reason == "length"
    session.chat("again", max_tokens=2).finish()
    # <|user|> … <|end|> <|assistant|> … <|end|>: every turn is closed once
    marks = [t for t in session.tokens if t in (3, 4, 5, 6)]
    assert marks == [4, 6, 5, 6, 4, 6, 5, 6, 4, 6, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_anywhere_the_talk_goes_on(kind: str) -> None:
    rng = random.Random(5)
    session = model(kind).session(seed=3)
    for turn in range(6):
        if kind == "hybrid" and len(session.tokens) > 25:
            session.reset()
        generation = session.chat(f"turn {turn}", max_tokens=6, **HOT)
        way, at = rng.choice(["cancel", "close", "early"]), rng.randrange(3)
        if way == "early":
            generation.cancel()
        before = session.messages
        for count, _ in enumerate(generation):
            if count >= at:
                if way == "close":
                    generation.close()
                    break
                session.cancel()
        result = generation.result
        assert agrees(session)
        if not result.tokens:
            assert session.messages == before
        else:
            assert session.messages[-1].content == result.text
            assert session.messages[-2].content == f"turn {turn}"


def test_a_stop_string_is_taken_out_of_the_state_too() -> None:
    session = model("bytes").session(seed=1)
    free = session.chat("hello", max_tokens=20, temperature=5.0).finish()
    stop = next(free.text[i : i + 2] for i in range(2, 18) if "\ufffd" not in free.text[i : i + 2])
    session = model("bytes").session(seed=1)
    result = session.chat("hello", max_tokens=20, temperature=5.0, stop=[stop]).finish()
    assert result.finish_reason == "stop" and stop not in result.text
    answer = session.messages[-1]
    assert answer.tokens is not None and answer.content == result.text
    assert len(answer.tokens) < len(result.tokens)
    assert agrees(session)
    held = len(session.tokens)
    assert session.chat("more", max_tokens=2).finish().reused_tokens == held


@pytest.mark.parametrize("kind", KINDS)
def test_undo_is_as_if_the_turn_had_not_been(kind: str) -> None:
    session, twin = model(kind).session(seed=4), model(kind).session(seed=4)
    for each in (session, twin):
        each.chat("hello", max_tokens=4, **HOT).finish()
    session.chat("nonsense", max_tokens=4, **HOT).finish()
    session.undo()
    assert session.messages == twin.messages and session.tokens == twin.tokens
    results = [each.chat("then", max_tokens=6, **HOT).finish() for each in (session, twin)]
    assert results[0].tokens == results[1].tokens
    assert results[0].prompt_tokens == results[1].prompt_tokens  # nothing was run again
    session.undo()
    session.undo()
    assert session.messages == () and session.tokens == ()


def test_snapshots_come_back_any_number_of_times() -> None:
    session = model("chat").session(seed=6)
    session.chat("hello", max_tokens=4, **HOT).finish()
    place = session.snapshot()
    answers = set()
    for _ in range(3):
        session.restore(place)
        answers.add(session.chat("then", max_tokens=6, **HOT).finish().tokens)
    assert len(answers) == 1
    with pytest.raises(StateError):
        model("hybrid").session().restore(place)


def test_a_list_of_messages_reuses_what_it_shares() -> None:
    session = model("chat").session(seed=7)
    session.chat("hello", max_tokens=4, **HOT).finish()
    held = len(session.tokens)
    plain = [{"role": m.role, "content": m.content} for m in session.messages]
    result = session.chat([*plain, {"role": "user", "content": "then"}], max_tokens=4).finish()
    assert result.reused_tokens == held
    # another beginning shares no prefix that the state could rewind to
    result = session.chat([{"role": "user", "content": "other"}], max_tokens=4).finish()
    assert result.reused_tokens == 0
    assert [m.role for m in session.messages] == ["user", "assistant"]
    assert agrees(session)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_question_again_is_answered_again(kind: str) -> None:
    session = model(kind).session()
    question = [Message("user", "hello")]
    # after one token the state holds only the prompt
    first = session.chat(question, max_tokens=1, temperature=0).finish()
    again = session.chat(question, max_tokens=1, temperature=0).finish()
    assert again.tokens == first.tokens and again.prompt_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_talk_goes_on_as_if_never_left(kind: str, tmp_path: Path) -> None:
    session = model(kind).session(system="be kind", seed=8)
    session.chat("hello", max_tokens=5, **HOT).finish()
    session.save(tmp_path / "talk")
    other = model(kind).session()
    assert other.load(tmp_path / "talk") == len(session.tokens)
    assert other.messages == session.messages and other.pending == session.pending
    for text in ("then", "so"):
        results = [s.chat(text, max_tokens=5, **HOT).finish() for s in (session, other)]
        assert results[0].tokens == results[1].tokens
        assert results[0].prompt_tokens == results[1].prompt_tokens
        assert results[1].reused_tokens == results[0].reused_tokens > 0
    other.undo()
    other.undo()
    other.undo()  # and the loading itself
    assert other.tokens == () and other.messages == ()


def test_a_saved_text_goes_on_as_if_never_left(tmp_path: Path) -> None:
    session = model("bytes").session(seed=9)
    session.generate("the state", max_tokens=5, **HOT).finish()
    session.save(tmp_path / "text")
    other = model("bytes").session()
    other.load(tmp_path / "text")
    results = [s.generate(max_tokens=9, **HOT).finish() for s in (session, other)]
    assert results[0].tokens == results[1].tokens
    assert results[1].prompt_tokens == 1


def test_files_that_are_no_saved_session_change_nothing(tmp_path: Path) -> None:
    session = model("chat").session(seed=8)
    session.chat("hello", max_tokens=5, **HOT).finish()
    before = (session.tokens, session.messages, session.pending)
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(StateError):
        session.load(tmp_path / "junk")
    with pytest.raises(StateError):
        session.load(tmp_path / "nowhere")
    with pytest.raises(StateError):
        session.save(tmp_path / "no" / "folder")
    model("hybrid").session().save(tmp_path / "other")
    with pytest.raises(StateError):
        session.load(tmp_path / "other")
    state = session.model.engine.new_state()
    state.restore(session.snapshot().context.state)
    extra = {"session": 1, "messages": [], "tokens": list(session.tokens), "pending": None}
    for bad in [
        {}, {"session": 2}, extra, extra | {"rng": {}}, extra | {"tokens": [-1], "rng": {}},
        extra | {"tokens": [1.5]}, extra | {"messages": [{"role": "x" * 99, "content": ""}]},
        extra | {"pending": 1 << 40}, extra | {"messages": 5}, extra | {"tokens": []},
    ]:  # fmt: skip
        state.save(tmp_path / "bad", json.loads(json.dumps(bad)))
        with pytest.raises(StateError):
            session.load(tmp_path / "bad")
        assert (session.tokens, session.messages, session.pending) == before
        assert session.position == len(session.tokens)


def test_what_a_chat_refuses() -> None:
    session = model("hybrid").session(capacity=30)
    with pytest.raises(ContextFullError):
        session.chat("word " * 30)
    with pytest.raises(InputError, match="messages"):
        session.chat([])
    with pytest.raises(InputError, match="answer"):
        session.chat([Message("assistant", "x")])
    for bad in ({"role": "user"}, {"role": "user", "content": 5}, {"role": "A|>", "content": ""}):
        with pytest.raises(InputError, match=r"messages\.0"):
            session.chat([bad])  # type: ignore[list-item]
    with pytest.raises(InputError, match="Unicode"):
        session.chat("\ud800")
    assert session.messages == () and session.tokens == ()
    session.chat("a", max_tokens=1).finish()
    with pytest.raises(InputError, match="is a chat"):
        session.generate("text")
    session.reset()
    session.generate("text", max_tokens=1).finish()
    with pytest.raises(InputError, match="running text"):
        session.chat("a")


def test_the_context_ends_an_answer_and_the_talk_says_so() -> None:
    session = model("hybrid").session(capacity=24)
    result = session.chat("hello", max_tokens=99, temperature=0, logit_bias={END: -99.0}).finish()
    assert result.finish_reason == "context"
    assert agrees(session)
    with pytest.raises(ContextFullError):
        session.chat("more")
    session.undo()
    assert session.chat("hi", max_tokens=2).finish().tokens


def test_reset_keeps_the_system_message_and_can_be_undone() -> None:
    session = model("chat").session(system="be kind")
    session.chat("hello", max_tokens=3).finish()
    before = (session.messages, session.tokens)
    session.reset()
    assert session.messages == (Message("system", "be kind"),) and session.tokens == ()
    session.undo()
    assert (session.messages, session.tokens) == before


def _chatting(**options: object) -> Session:
    return model("chat").session(seed=5, **options)


def test_an_answer_is_made_again_from_the_state_after_its_prompt() -> None:
    session, plain = _chatting(), _chatting()
    for one in (session, plain):
        one.chat("first", temperature=0, max_tokens=5).finish()
    session.chat("one two", temperature=2, max_tokens=6).finish()
    before = session.messages
    again = session.regenerate(temperature=0, max_tokens=6).finish()
    expected = plain.chat("one two", temperature=0, max_tokens=6).finish()
    assert again.tokens == expected.tokens
    assert again.prompt_tokens == 0
    assert again.reused_tokens == expected.prompt_tokens + expected.reused_tokens
    assert session.messages == plain.messages != before
    assert session.tokens == plain.tokens
    assert session.undo_levels == plain.undo_levels
    session.undo()
    assert len(session.messages) == 2


def test_made_again_and_again_and_sampled_anew_each_time() -> None:
    session = _chatting()
    session.chat("one two", temperature=1.5, max_tokens=8).finish()
    texts = {session.regenerate(temperature=1.5, max_tokens=8).finish().tokens for _ in range(4)}
    assert len(texts) > 1
    assert len(session.messages) == 2


def test_an_answer_made_again_that_fails_leaves_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = _chatting()
    session.chat("one two", temperature=0, max_tokens=5).finish()
    messages, tokens = session.messages, session.tokens

    def fails(*_: object, **__: object) -> None:
        raise EngineError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(session.model.engine, "run", fails)
        patch.setattr(session.model.engine, "run_greedy", fails, raising=False)
        with pytest.raises(EngineError):
            session.regenerate(temperature=0, max_tokens=5).finish()
    assert (session.messages, session.tokens) == (messages, tokens)


def test_nothing_to_make_again() -> None:
    session = _chatting()
    with pytest.raises(StateError, match="no answer"):
        session.regenerate()
    session.chat("one two", temperature=0, max_tokens=5).finish()
    session.undo()
    with pytest.raises(StateError, match="no answer"):
        session.regenerate()


def test_another_system_message_begins_anew() -> None:
    session = _chatting(system="one")
    session.chat("first", temperature=0, max_tokens=4).finish()
    session.reset("two three")
    assert [message.content for message in session.messages] == ["two three"]
    session.chat("first", temperature=0, max_tokens=4).finish()
    fresh = _chatting(system="two three")
    fresh.chat("first", temperature=0, max_tokens=4).finish()
    assert session.tokens == fresh.tokens
    session.reset("")
    assert session.messages == ()


def test_a_session_is_held_to_the_memory_it_may_take() -> None:
    options: dict[str, Any] = {"capacity": 32, "undo_levels": 2}
    with pytest.raises(StateError, match=facts("max_bytes: ", 1000, "less than", "undo_levels")):
        model("hybrid").session(max_bytes=1000, **options)
    plan = model("hybrid").engine.memory_plan(capacity=32)
    most = plan["state_ring"] + plan["kv_cache"] + plan["logits"] + 5 * plan["snapshot"]
    with pytest.raises(StateError, match="each of 5 copies"):
        model("hybrid").session(max_bytes=most - 1, **options)
    assert model("hybrid").session(max_bytes=most, **options).state_bytes < most
