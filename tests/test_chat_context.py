"""A context that fills up: the messages about it, and what makes room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge.apps.chat import context, conversation, main
from edge.apps.chat.commands import COMMANDS, Chat
from edge.errors import ContextFullError, InputError
from edge.text.template import Message
from tests.facts import facts, says
from tests.programs import called
from tests.session_models import bundle, model
from tests.terminal import SHORT, Terminal

SAMPLING = {"max_tokens": 3, "seed": 1}


def chat(**options: object) -> Chat:
    session = model("hybrid").session(**options)  # 64 positions
    return Chat(session, "hybrid", dict(SAMPLING))


def test_the_parts_of_the_state_are_told_apart() -> None:
    session = model("hybrid").session(capacity=32)
    assert session.capacity == 32
    # keys and values of one layer, two heads of 8 in fp32
    assert session.state_bytes - session.constant_bytes == 2 * 2 * 8 * 32 * 4
    said = context.described(session)
    assert "whatever the length, and" in said and said.endswith("for a context of 32 tokens")
    pure = model("chat").session()
    assert pure.capacity is None and pure.constant_bytes == pure.state_bytes
    assert context.described(pure).endswith("whatever the length")
    assert context.described(session) in COMMANDS["/show"].run(chat(capacity=32), "")


def test_a_transformer_has_no_constant_part(monkeypatch: pytest.MonkeyPatch) -> None:
    session = model("hybrid").session(capacity=32)
    monkeypatch.setattr(type(session), "constant_bytes", 0)
    said = context.described(session)
    assert says(said, "47.1 kB", "32 tokens") and "whatever the length" not in said


def test_the_oldest_turns_make_room_and_undo_brings_them_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    this = chat(system="be")
    for number in range(12):
        before = this.session.messages
        assert not conversation.answer_line(this, f"turn {number}")
        assert this.session.messages[0] == Message("system", "be")
        assert this.session.messages[-2].content == f"turn {number}"
        if len(this.session.messages) < len(before) + 2:
            break
    else:
        pytest.fail("never full")
    said = capsys.readouterr().err
    assert says(said, "full", "oldest 2 messages")
    assert "% full: " in said
    this.session.undo()
    assert this.session.messages == before


def test_stopping_refuses_instead(capsys: pytest.CaptureFixture[str]) -> None:
    this = chat()
    this.drops = False
    with pytest.raises(ContextFullError):
        for number in range(20):
            conversation.answer_line(this, f"turn {number}")


def test_a_file_that_does_not_fit_is_refused_and_forgotten(tmp_path: Path) -> None:
    this = chat()
    (tmp_path / "long.txt").write_text("word " * 100)
    with pytest.raises(InputError, match=r"^/read: \d+ tokens .* 64 \(send a part of it\)$"):
        COMMANDS["/read"].run(this, str(tmp_path / "long.txt"))
    with pytest.raises(InputError, match=facts("of 32 (", "a part of it", "--context")):
        COMMANDS["/read"].run(chat(capacity=32), str(tmp_path / "long.txt"))
    assert this.attached == ""
    (tmp_path / "half.txt").write_text("the state of " * 9)
    for _ in range(3):
        COMMANDS["/read"].run(this, str(tmp_path / "half.txt"))
    with pytest.raises(InputError, match=facts("/read", "discarded")):
        conversation.answer_line(this, "what is it?")
    assert this.attached == "" and not conversation.answer_line(this, "hello")


def test_options_of_edge_chat(tmp_path: Path) -> None:
    terminal = Terminal(
        str(bundle("hybrid")), *SHORT, "--context", "40", "--undo-levels", "1", "--window", "4",
        XDG_DATA_HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path),
    )  # fmt: skip
    assert len("state" + terminal.wait_for("for a context of 40 tokens").split("state")[-1]) < 60
    for line in ("one", "two", "three"):
        terminal.ask(line, "[ prompt")
    terminal.ask("/show", "turns to take back: 1")
    terminal.bye()
    for option in ("--context", "--undo-levels", "--window"):
        code, _, err = called(main, bundle("hybrid"), "-p", "x", option, "100000000")
        assert code == 2 and option in err
    assert called(main, "demo", "-p", "x", "--context-policy", "grow")[0] == 2


def test_what_read_kept_survives_a_message_that_was_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    this = Chat(model("chat").session(), "chat", {"max_tokens": 3, "seed": 1})

    @contextmanager
    def stopped(*_: object) -> Iterator[None]:
        this.session.cancel()
        yield

    kept = "a long text\n\n"
    this.attached = kept
    with monkeypatch.context() as patch:
        patch.setattr(conversation, "waiting", stopped)
        assert conversation.answer_line(this, "What does it say?")
    assert this.attached == kept and not this.session.messages
    assert says(capsys.readouterr().err, "/read", "kept")
    assert not conversation.answer_line(this, "And now?")
    assert this.attached == "" and this.session.messages[0].content.startswith(kept)
