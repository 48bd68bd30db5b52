"""A talk at a terminal: a prompt, answers that are only ever appended to, and commands."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from edge.apps.chat import files, output
from edge.apps.chat.commands import ALIASES, COMMANDS, Talk
from edge.apps.chat.input import reader
from edge.apps.chat.once import NO_TEMPLATE, begin, stopping
from edge.apps.units import megabytes
from edge.errors import EdgeError, InputError
from edge.runtime.engine import title

if TYPE_CHECKING:
    from types import FrameType

    from edge.apps.chat.gain import Gain
    from edge.runtime.generate import Generation
    from edge.runtime.session import Session


class HangUp(SystemExit):
    """The terminal is gone, or the process is told to end. Event loops let this one through."""


def talk(
    session: Session,
    name: str,
    sampling: Mapping[str, Any],
    gain: Gain | None = None,
) -> bool:
    """Talk until /bye, Ctrl-D (False) or Ctrl-C twice (True). A hang-up saves the talk, then
    raises SystemExit with 128 + the signal's number.

    `gain`: of drafting, where the session drafts.
    """
    output.prepare()
    engine, state = title(session.model.engine), megabytes(session.state_bytes)
    output.note(f"{name} on {engine}, state {state} whatever the length; /help for commands")
    if session.model.template is None:
        output.note(f"{NO_TEMPLATE}; an empty line goes on")
    this = Talk(session, name, dict(sampling), gain=gain)
    ask = reader({name: command.words for name, command in COMMANDS.items()})
    try:
        with _hanging_up(session) as told:
            return _loop(this, ask, told)
    except HangUp:
        _save_talk(session)
        raise


def _loop(this: Talk, ask: Callable[[], str], told: list[int]) -> bool:
    stopped = False
    while True:
        if told:
            raise HangUp(128 + told[0])
        try:
            line = ask()
        except EOFError:
            return False
        except KeyboardInterrupt:
            if stopped:
                return True
            stopped = True
            output.note("Ctrl-C again, or /bye, leaves")
            continue
        try:
            stopped = _turn(this, line)
        except EOFError:
            return False
        except KeyboardInterrupt:
            # pressed twice, or before the answer began: that turn has left no trace
            stopped = True
            output.note("stopped")
        except EdgeError as problem:
            stopped = False
            print(f"error: {problem}", file=sys.stderr, flush=True)


def _turn(this: Talk, line: str) -> bool:
    """A command or a message; whether an answer was stopped."""
    if line.startswith("/") and line[1:2].isalpha():
        word, _, argument = line.strip().partition(" ")
        word = ALIASES.get(word, word)
        if word not in COMMANDS:
            raise InputError(f"there is no command {word}", remedy="/help lists them")
        said = COMMANDS[word].run(this, argument.strip())
        if isinstance(said, str):
            output.note(said)
            return False
        return _answer(this, said)
    session, text = this.session, this.attached + line
    if session.model.template is None:
        if not text.strip():
            return _answer(this, begin(session, None, this.sampling))
        session.reset()  # each text is continued by itself
    elif not text.strip():
        return False
    generation = begin(session, text, this.sampling)
    this.attached = ""
    return _answer(this, generation)


def _answer(this: Talk, generation: Generation) -> bool:
    stream = output.Stream(sys.stdout)
    if this.gain:
        this.gain.begin()
    try:
        with stopping(this.session):
            for piece in generation:
                stream.write(piece)
    finally:
        # first: of an answer that cannot be written the session must know
        generation.close()
        stream.end()
    result = this.last = generation.result
    this.answers, this.tokens = this.answers + 1, this.tokens + len(result.tokens)
    this.last_gain = this.gain.add(result) if this.gain else None
    if this.figures:
        output.note(output.figures(result, this.session, this.gain, this.last_gain))
    return result.finish_reason == "cancelled"


@contextmanager
def _hanging_up(session: Session) -> Iterator[list[int]]:
    """SIGHUP and SIGTERM end an answer where it is, then the talk: the list names the signal."""
    told: list[int] = []

    def hang_up(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if session.busy:
            session.cancel()
        else:
            raise HangUp(128 + number)

    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(number, hang_up) for number in numbers]
    try:
        yield told
    except OSError:
        # a terminal that is gone refuses to be written to, sometimes before the signal comes
        raise HangUp(128 + (told[0] if told else signal.SIGHUP)) from None
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _save_talk(session: Session) -> None:
    if not session.tokens:
        return
    path = files.talks() / time.strftime("hangup-%Y%m%d-%H%M%S.edge")
    # nobody may be there to read either line
    with suppress(OSError):
        try:
            session.save(files.ready(path))
            output.note(f"the talk is saved: /load {path.stem}")
        except EdgeError as problem:
            print(f"error: {problem}", file=sys.stderr, flush=True)
