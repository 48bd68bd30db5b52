"""`edge-chat` on a pseudo-terminal, as its user sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable

import pyte

from tests.forks import Fork

ENDLESS = ["--temperature", "5", "--seed", "1", "--max-tokens", "100000000"]
SHORT = ["--temperature", "5", "--max-tokens", "4", "--seed", "1"]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[=>]|\].*?\x07)")
GIVE_UP = 60  # seconds; a chat that hangs must fail


class Terminal:
    """A program as the foreground process of its own terminal."""

    def __init__(
        self, *arguments: str, term: str = "xterm", size: tuple[int, int] = (24, 80),
        module: str = "edge.apps.chat", anew: bool = False, **environment: str,
    ) -> None:  # fmt: skip
        """`anew`: start Python, instead of forking a process that has imported the programs."""
        self._master, slave = pty.openpty()
        self._size = size
        self.resize(*size)
        # pytest's workers set these, which would override the terminal's own size
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        told = inherited | {"TERM": term} | environment
        start = _started if anew else _forked
        self.process = start(module, arguments, os.ttyname(slave), told)
        self._slave = slave
        self.raw = ""
        self._seen = 0

    def wait_for(self, text: str) -> str:
        """Return the output since the last wait, up to `text`, without escape sequences."""
        plain, at = self._until(lambda plain: plain.find(text, self._seen), f"no {text!r}")
        since, self._seen = plain[self._seen : at], at + len(text)
        return since

    def answering(self) -> None:
        """Wait until an endless answer is in its middle."""
        self.wait_for("\n")
        self._until(lambda plain: len(plain) - self._seen - 40, "no answer")

    def _until(self, where: Callable[[str], int], problem: str) -> tuple[str, int]:
        """Return all output, without escape sequences, once the condition finds a place in it."""
        deadline = time.monotonic() + GIVE_UP
        while True:
            plain = ESCAPES.sub("", self.raw)
            if (at := where(plain)) >= 0:
                return plain, at
            assert time.monotonic() < deadline, f"{problem} in {plain[self._seen :]!r}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.raw += os.read(self._master, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def ask(self, text: str, says: str = "") -> str:
        """Type a line at the prompt; return the output until the program `says` something."""
        self.wait_for(">>>")
        self.type(text + "\r")
        return self.wait_for(says) if says else ""

    def bye(self) -> None:
        """End the conversation; the program must exit normally."""
        self.ask("/bye")
        assert self.leave() == 0

    def resize(self, rows: int, columns: int) -> None:
        """Resize like a dragged window: the program gets SIGWINCH."""
        self._size = (rows, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def screen(self) -> list[str]:
        """Return every line that a terminal of this size has shown, scrolled off or not, as it
        looks now.
        """
        rows, columns = self._size
        shown = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1.0)
        pyte.Stream(shown).feed(self.raw)
        above = ["".join(line[x].data for x in range(columns)) for line in shown.history.top]
        return [line.rstrip() for line in [*above, *shown.display]]

    def hang_up(self) -> None:
        """Close both ends: the kernel signals the program, as when a connection is lost."""
        os.close(self._slave)
        os.close(self._master)

    def leave(self) -> int:
        code = self.process.wait(timeout=GIVE_UP)
        while select.select([self._master], [], [], 0)[0]:
            self.raw += os.read(self._master, 65536).decode(errors="replace")
        os.close(self._slave)
        os.close(self._master)
        assert "Traceback" not in self.raw, self.raw
        return code


def _forked(
    module: str, arguments: tuple[str, ...], terminal: str, environment: dict[str, str]
) -> Fork:
    return Fork(module, *arguments, terminal=terminal, environment=environment)


def _started(
    module: str, arguments: tuple[str, ...], terminal: str, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    # opening a terminal makes it the controlling one of a new session, so that Ctrl-C works
    return subprocess.Popen(
        ["sh", "-c", 'exec "$@" <"$TTY" >"$TTY" 2>&1', "sh", sys.executable, "-m",
         module, *arguments],
        start_new_session=True, env=environment | {"TTY": terminal},
    )  # fmt: skip
