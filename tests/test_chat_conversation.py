"""`edge-chat` at a terminal: real processes on a pseudo-terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session_models import bundle
from tests.terminal import ENDLESS, SHORT, Terminal


def test_a_talk_with_every_command(tmp_path: Path) -> None:
    file = tmp_path / "a talk"
    terminal = Terminal(
        str(bundle("chat")), *SHORT, "--system", "be kind", size=(24, 120), anew=True
    )
    terminal.wait_for("/help for commands")
    terminal.ask("hello", "[ prompt")
    assert "reused 0" in terminal.wait_for("]")
    terminal.ask("then", "[ prompt")
    assert "reused 0" not in terminal.wait_for("]")
    terminal.ask(f"/save {file}", "saved a conversation of 5 messages")
    terminal.ask("/undo", "undone; a conversation of 3 messages")
    terminal.ask("/reset", "cleared")
    terminal.ask("/undo", "3 messages")
    terminal.ask(f"/load {file}", "resumed a conversation of 5 messages (")
    assert int(terminal.wait_for(" tokens restored from")) > 10
    for line, says in [
        ("/help", "/load NAME"),
        ("/nonsense", "error: unknown command /nonsense (/help lists them)"),
        ("/save", "error: /save: needs a name"),
        ("/load /nowhere/at/all", "error: "),
        ("", ">>>"),
    ]:
        terminal.ask(line, says)
    terminal.type("and more\r")
    terminal.wait_for("[ prompt")
    terminal.bye()


def test_ctrl_c_stops_the_answer_keeps_the_talk_and_then_leaves() -> None:
    terminal = Terminal(str(bundle("bytes")), *ENDLESS)
    terminal.ask("hello")
    for turn in range(2):
        terminal.answering()
        terminal.type("\x03")
        terminal.wait_for("stopped")
        if turn == 0:
            terminal.ask("more")
    terminal.wait_for(">>>")
    terminal.type("\x03")
    assert terminal.leave() == 130


def test_ctrl_c_at_the_prompt_asks_first_and_ctrl_d_leaves() -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT)
    terminal.wait_for(">>>")
    terminal.type("\x03")
    terminal.wait_for("/bye, to leave")
    terminal.wait_for(">>>")
    terminal.type("\x04")
    assert terminal.leave() == 0


def test_ctrl_c_takes_back_what_is_typed_and_leaves_no_talk() -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT)
    terminal.wait_for(">>>")
    terminal.type("\x03")
    terminal.wait_for("press Ctrl-C again")
    for typed, lines in (("half a line\x03", 1), ('"""\rtwo\r\x03', 3)):
        terminal.wait_for(">>>")
        terminal.type(typed)
        for _ in range(lines):  # between two prompts the terminal would swallow what is typed
            terminal.wait_for("\n")
    terminal.ask("hello", "[ prompt")
    terminal.bye()


def test_a_full_context_is_said_and_undone() -> None:
    terminal = Terminal(str(bundle("hybrid")), *SHORT, "--context-policy", "stop")  # 64 positions
    terminal.ask("word " * 40, "error: ")
    terminal.ask("hello", "[ prompt")
    terminal.bye()


def test_a_base_model_continues_texts() -> None:
    terminal = Terminal(str(bundle("base")), *SHORT, size=(24, 120))
    terminal.wait_for("no chat template")
    assert "reused 0" in terminal.ask("the state", "state ")
    terminal.ask("", "prompt 1 at ")
    terminal.bye()


@pytest.mark.parametrize("environment", [{"term": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_terminals_get_plain_lines(environment: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, **environment)
    terminal.ask("hello", "[ prompt")
    terminal.bye()
    assert "\x1b[2m" not in terminal.raw
    assert "term" not in environment or "\x1b" not in terminal.raw
