"""A talk at a terminal: a prompt, answers that are only ever appended to, a few commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.apps import chat_output
from edge.apps.chat_once import NO_TEMPLATE, begin, stopping
from edge.apps.units import megabytes
from edge.errors import EdgeError, InputError

if TYPE_CHECKING:
    from edge.runtime.session import Session

PROMPT = ">>> "
HELP = """\
/reset        forget the conversation
/undo         take back the last turn
/save FILE    write the conversation, with its state
/load FILE    take up a saved conversation
/bye          leave (as Ctrl-D does)
Ctrl-C stops an answer; again, at the prompt, leaves."""

Ask = Callable[[], str]


def talk(session: Session, name: str, sampling: Mapping[str, Any]) -> bool:
    """Talk until /bye, Ctrl-D (False) or Ctrl-C twice (True)."""
    chat_output.prepare()
    engine, state = session.model.engine.name, megabytes(session.state_bytes)
    chat_output.note(f"{name} on {engine}, state {state} whatever the length; /help for commands")
    if session.model.template is None:
        chat_output.note(f"{NO_TEMPLATE}; an empty line goes on")
    ask = _asker()
    stopped = False
    while True:
        try:
            line = ask()
        except EOFError:
            return False
        except KeyboardInterrupt:
            if stopped:
                return True
            stopped = True
            chat_output.note("Ctrl-C again, or /bye, leaves")
            continue
        try:
            if line.strip() == "/bye":
                return False
            stopped = _turn(session, line, sampling)
        except KeyboardInterrupt:
            # pressed twice, or before the answer began: that turn has left no trace
            stopped = True
            chat_output.note("stopped")
        except EdgeError as problem:
            stopped = False
            print(f"error: {problem}", file=sys.stderr, flush=True)


def _turn(session: Session, line: str, sampling: Mapping[str, Any]) -> bool:
    """A command or a message; whether an answer was stopped."""
    if line.startswith("/") and line[1:2].isalpha():
        command, _, argument = line.strip().partition(" ")
        chat_output.note(_command(session, command, argument.strip()))
        return False
    text: str | None = line
    if session.model.template is None:
        if line.strip():
            session.reset()  # each text is continued by itself
        else:
            text = None
    elif not line.strip():
        return False
    stream = chat_output.Stream(sys.stdout)
    generation = begin(session, text, sampling)
    try:
        with stopping(session):
            for piece in generation:
                stream.write(piece)
    finally:
        stream.end()
    chat_output.note(chat_output.figures(generation.result, session))
    return generation.result.finish_reason == "cancelled"


def _command(session: Session, command: str, argument: str) -> str:
    if command == "/help":
        return HELP
    if command == "/reset":
        session.reset()
        return "forgotten; /undo brings it back"
    if command == "/undo":
        session.undo()
        return f"taken back; {_length(session)}"
    if command == "/save":
        path = _file(command, argument)
        session.save(path)
        return f"saved {_length(session)} to {path} ({megabytes(path.stat().st_size)})"
    if command == "/load":
        path = _file(command, argument)
        spared = session.load(path)
        return f"took up {_length(session)}: {spared} tokens need not be run again"
    raise InputError(f"there is no command {command}", remedy="/help lists them")


def _file(command: str, argument: str) -> Path:
    if not argument:
        raise InputError("needs a file", field=command, remedy=f"{command} FILE")
    return Path(os.path.expanduser(argument))


def _length(session: Session) -> str:
    if session.model.template is None:
        return f"a text of {len(session.tokens)} tokens"
    return f"a conversation of {len(session.messages)} messages"


def _asker() -> Ask:
    """How lines are read: with history and editing where the terminal can do that."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return _plain_ask
    # some terminals, and all serial lines, never answer where the cursor is
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = ["/help", "/reset", "/undo", "/save", "/load", "/bye"]
    completer = WordCompleter(words, sentence=True)
    prompt: PromptSession[str] = PromptSession(completer=completer, complete_while_typing=False)
    return lambda: prompt.prompt(PROMPT)


def _plain_ask() -> str:
    print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
