"""Lines from a terminal, with history, editing and completion if the terminal is capable."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from edge.apps.chat import files
from edge.apps.terminal import say

if TYPE_CHECKING:
    from prompt_toolkit import Application, PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = ">>> "
MORE = "... "
FENCE = '"""'

Ask = Callable[[str], str]
# command → words that may follow it, and whether a path may
Following = Callable[[str], tuple[list[str], bool]]


class Cleared(KeyboardInterrupt):
    """Ctrl-C cleared a line that was being typed."""


def reader(commands: Collection[str], following: Following) -> Callable[[], str]:
    r"""Return a function that reads the next message: a line, or all lines between \"\"\".

    `commands` and the words `following` each are completed. The function raises EOFError at the end
    of input, Cleared when Ctrl-C clears typed text, and KeyboardInterrupt for any other Ctrl-C.
    """
    capable = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    ask = _toolkit_ask(commands, following) if capable else _plain_ask
    return lambda: _read_message(ask)


def _read_message(ask: Ask) -> str:
    line = ask(PROMPT)
    if not line.lstrip().startswith(FENCE):
        return line
    text = line.lstrip()[len(FENCE) :]
    while FENCE not in text:
        try:
            text += "\n" + ask(MORE)
        except KeyboardInterrupt:
            raise Cleared from None
    return text[: text.index(FENCE)].strip("\n")


def _plain_ask(prompt: str) -> str:
    say(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _toolkit_ask(commands: Collection[str], following: Following) -> Ask:
    # some terminals, and all serial lines, never answer a query for the cursor position
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        completer=command_completer(commands, following),
        complete_while_typing=False,
        history=_history(),
        key_bindings=_keys(),
        enable_history_search=True,
    )
    leave_on_signals(session)

    def ask(prompt: str) -> str:
        # before and after a line can be typed, an exception would break the event loop's making
        previous = signal.signal(signal.SIGINT, lambda number, frame: None)
        try:
            return session.prompt(prompt)
        finally:
            signal.signal(signal.SIGINT, previous)

    return ask


def leave_on_signals(session: PromptSession[str]) -> None:
    """Let SIGINT end a prompt as Ctrl-C does; one that arrives after its end changes nothing.

    prompt_toolkit would make it a key. After the end, that raises an exception in the event loop,
    or starts a task for which the next prompt fails. Between two prompts Ctrl-C is a signal.
    """
    processor = session.app.key_processor
    processor.send_sigint = lambda: _leave(session.app)  # type: ignore[method-assign]


def _leave(app: Application[str]) -> None:
    if app.is_running and not app.is_done:
        exception = Cleared if app.current_buffer.text else KeyboardInterrupt
        app.exit(exception=exception, style="class:aborting")


def command_completer(commands: Collection[str], following: Following) -> Completer:
    """Return a completer of commands and their arguments.

    NestedCompleter would not do: it does not take a slash for a letter.
    """
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            text = document.text_before_cursor
            command, space, rest = text.partition(" ")
            words, path = following(command) if space else (list(commands), False)
            typed = rest.lstrip() if space else text
            for word in words if typed or space else ():
                if word.startswith(typed):
                    yield Completion(word, start_position=-len(typed))
            if path:
                yield from paths.get_completions(Document(typed), complete_event)

    return Commands()


def _history() -> History:
    """Return the history of typed lines, kept in a file if possible."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = files.history()
    try:
        if os.environ.get("EDGE_CHAT_HISTORY") == "off":
            return InMemoryHistory()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab"):
            pass
        with suppress(OSError):
            path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("c-g")
    def _edit(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    @keys.add("c-c")
    def _interrupt(event: KeyPressEvent) -> None:
        _leave(event.app)

    return keys
