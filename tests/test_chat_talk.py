"""`edge-chat` at a terminal: real processes on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.session_models import bundle

ENDLESS = ["--temperature", "5", "--max-tokens", "100000000"]
SHORT = ["--temperature", "5", "--max-tokens", "4", "--seed", "1"]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\].*?\x07)")
GIVE_UP = 60  # seconds; a talk that hangs must fail


class Terminal:
    """A program on a terminal of its own, which it is the foreground process of."""

    def __init__(self, *arguments: str, term: str = "xterm", **environment: str) -> None:
        self._master, slave = pty.openpty()
        # opening a terminal makes it the controlling one of a new session: Ctrl-C then works
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" <"$TTY" >"$TTY" 2>&1', "sh", sys.executable, "-m",
             "edge.apps.chat", *arguments],
            start_new_session=True,
            env=os.environ | {"TTY": os.ttyname(slave), "TERM": term} | environment,
        )  # fmt: skip
        self._slave = slave
        self.raw = ""
        self._seen = 0

    def wait_for(self, text: str) -> str:
        """What came since the last wait, up to `text`, without escape sequences."""
        deadline = time.monotonic() + GIVE_UP
        while True:
            plain = ESCAPES.sub("", self.raw)
            at = plain.find(text, self._seen)
            if at >= 0:
                since, self._seen = plain[self._seen : at], at + len(text)
                return since
            assert time.monotonic() < deadline, f"no {text!r} in {plain[self._seen :]!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.raw += os.read(self._master, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ask(self, text: str) -> None:
        """Type a line at the prompt."""
        self.wait_for(">>>")
        self.type(text + "\r")

    def leave(self) -> int:
        code = self.process.wait(timeout=GIVE_UP)
        while select.select([self._master], [], [], 0)[0]:
            self.raw += os.read(self._master, 65536).decode(errors="replace")
        os.close(self._slave)
        os.close(self._master)
        assert "Traceback" not in self.raw
        return code


def test_a_talk_with_every_command(tmp_path: Path) -> None:
    file = tmp_path / "a talk"
    terminal = Terminal(str(bundle("chat")), *SHORT, "--system", "be kind")
    terminal.wait_for("/help for commands")
    terminal.ask("hello")
    terminal.wait_for("[ prompt")
    assert "reused 0" in terminal.wait_for("]")
    terminal.ask("then")
    terminal.wait_for("[ prompt")
    assert "reused 0" not in terminal.wait_for("]")
    terminal.ask(f"/save {file}")
    terminal.wait_for("saved a conversation of 5 messages")
    terminal.ask("/undo")
    terminal.wait_for("taken back; a conversation of 3 messages")
    terminal.ask("/reset")
    terminal.wait_for("forgotten")
    terminal.ask("/undo")
    terminal.wait_for("3 messages")
    terminal.ask(f"/load {file}")
    terminal.wait_for("took up a conversation of 5 messages")
    assert int(terminal.wait_for(" tokens need not be run again").strip(": ")) > 10
    for line, says in [
        ("/help", "/load FILE"),
        ("/nonsense", "error: there is no command /nonsense (/help lists them)"),
        ("/save", "error: /save: needs a file"),
        ("/load /nowhere/at/all", "error: "),
        ("", ">>>"),
    ]:
        terminal.ask(line)
        terminal.wait_for(says)
    terminal.type("and more\r")
    terminal.wait_for("[ prompt")
    terminal.ask("/bye")
    assert terminal.leave() == 0


def test_ctrl_c_stops_the_answer_keeps_the_talk_and_then_leaves() -> None:
    terminal = Terminal(str(bundle("bytes")), *ENDLESS)
    terminal.ask("hello")
    for turn in range(2):
        terminal.wait_for("\n")
        time.sleep(0.2)  # into the answer; whenever it comes, the outcome must be the same
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
    terminal.type("half a line\x03")
    terminal.wait_for("Ctrl-C again, or /bye, leaves")
    terminal.wait_for(">>>")
    terminal.type("\x04")
    assert terminal.leave() == 0


def test_a_full_context_is_said_and_undone() -> None:
    terminal = Terminal(str(bundle("hybrid")), *SHORT)  # 64 positions
    terminal.ask("word " * 40)
    terminal.wait_for("error: ")
    terminal.ask("hello")
    terminal.wait_for("[ prompt")
    terminal.ask("/bye")
    assert terminal.leave() == 0


def test_a_base_model_continues_texts() -> None:
    terminal = Terminal(str(bundle("base")), *SHORT)
    terminal.wait_for("no chat template")
    terminal.ask("the state")
    assert "reused 0" in terminal.wait_for("state ")
    terminal.ask("")
    terminal.wait_for("prompt 1 at ")
    terminal.ask("/bye")
    assert terminal.leave() == 0


@pytest.mark.parametrize("environment", [{"term": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_terminals_get_plain_lines(environment: dict[str, str]) -> None:
    terminal = Terminal(str(bundle("chat")), *SHORT, **environment)
    terminal.ask("hello")
    terminal.wait_for("[ prompt")
    terminal.ask("/bye")
    assert terminal.leave() == 0
    assert "\x1b[2m" not in terminal.raw
    assert "term" not in environment or "\x1b" not in terminal.raw
