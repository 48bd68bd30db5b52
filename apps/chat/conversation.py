"""Answers at a terminal or in a pipe: a single one, or a conversation with commands."""

from __future__ import annotations

import json
import math
import select
import signal
import sys
import time
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
AGAIN_S = 1.0  # after which another signal to leave counts, if the first has had no effect
WAIT_S = 3.0  # for the first bytes of a pipe, if -p gave a prompt anyway
# note on the first screen about the models inside the package
DEMONSTRATION = (
    "a tiny demonstration: it makes small talk and shows that the runtime works",
    "for a real model: edge pull smollm2-hybrid; or edge export CHECKPOINT",
)


class HangUp(SystemExit):
    """The terminal is gone, or the process must end. Event loops let a SystemExit through."""


def given_prompt(option: str | None) -> str | None:
    """Return the prompt: piped text, then that of -p; None if there is neither at a terminal."""
    if sys.stdin is None:  # closed: nobody is at a terminal, and nothing is piped
        return option or ""
    if sys.stdin.isatty():
        return option
    piped = _read_pipe(patient=not option)
    return f"{piped}\n\n{option}" if piped and option else option or piped


def _read_pipe(patient: bool) -> str:
    """Read the text of standard input.

    Unless `patient`, wait only WAIT_S for it: a program that gave -p may leave it open and never
    write.
    """
    if not patient:
        with suppress(OSError, ValueError):
            if not select.select([sys.stdin], [], [], WAIT_S)[0]:
                output.note(f"note: nothing came on standard input in {WAIT_S:g} s; ignoring it")
                return ""
    # in pieces: a buffer of MAX_INPUT is seldom needed, and not always available
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
    """Write the answer to standard output; return whether it was interrupted.

    `gain`: estimator of the speed-up, if the session drafts. `as_json`: write one object at the
    end.
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
        with _stop_on_interrupt(session):
            result = _begin(session, prompt, sampling).finish()
        say(json.dumps(output.facts(result, session)))
        return result.finish_reason == "cancelled"
    this = Chat(session, "", dict(sampling), gain=gain)
    return _answer(this, _begin(session, prompt, sampling))


def _begin(session: Session, text: str | None, sampling: Mapping[str, Any]) -> Generation:
    """Start an answer, or a continuation by a base model; None continues the last text."""
    if session.model.template is None or text is None:
        return session.generate(text, **sampling)
    return session.chat(text, **sampling)


def _answer(this: Chat, generation: Generation) -> bool:
    """Show an answer as it arrives, then its figures; return whether it was stopped."""
    # a line break inside a string would make JSON invalid
    stream = output.Stream(sys.stdout, wraps=not any(this.sampling.get(kind) for kind in KINDS))
    if this.gain:
        this.gain.begin()
    try:
        with _stop_on_interrupt(this.session):
            with waiting("reading the prompt", lambda: generation.prefill, "tokens"):
                first = next(generation, "")
            stream.write(first)
            for piece in generation:
                stream.write(piece)
    finally:
        # close first: the session must learn of an answer that cannot be written
        generation.close()
        stream.end()
    result = generation.result
    this.add(result)
    if this.figures:
        width = output.columns()
        output.note(output.figures(result, this.session, this.gain, this.last_gain, width))
    return result.finish_reason == "cancelled"


@contextmanager
def _stop_on_interrupt(session: Session) -> Iterator[None]:
    """Let the first Ctrl-C stop the answer, and a second one end the program."""
    pressed = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        session.cancel()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def converse(
    session: Session,
    name: str,
    sampling: Mapping[str, Any],
    gain: Gain | None = None,
    drops: bool = True,
) -> bool:
    """Read lines and answer them until /bye or Ctrl-D (False), or Ctrl-C twice (True).

    A hang-up saves the conversation, then raises SystemExit with 128 + the signal's number.
    `gain`: estimator of the speed-up, if the session drafts. `drops`: drop the oldest turns when
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
    with save_on_hangup(session) as signals:
        return _loop(this, ask, signals)


def _loop(this: Chat, ask: Callable[[], str], signals: list[int]) -> bool:
    stopped = False
    while True:
        if signals:
            raise HangUp(128 + signals[0])
        try:
            line = ask()
        except EOFError:
            return False
        except Cleared:  # clearing a line does not mean leaving
            stopped = False
            continue
        except KeyboardInterrupt:
            if stopped:
                return True
            stopped = True
            output.note("press Ctrl-C again, or type /bye, to leave")
            continue
        try:
            stopped = answer_line(this, line)
        except EOFError:
            return False
        except KeyboardInterrupt:
            # Ctrl-C twice, or before the answer began: the turn has left no trace
            stopped = True
            output.note("stopped")
        except EdgeError as problem:
            stopped = False
            output.complain(problem)


def answer_line(this: Chat, line: str) -> bool:
    """Run a command or answer a message; return whether an answer was stopped."""
    word, _, argument = line.strip().partition(" ")
    # a path such as /tmp/x is no command
    if line.startswith("/") and (word[1:].isalpha() or word in ALIASES):
        result = command(word, argument.strip())(this, argument.strip())
        if isinstance(result, str):
            output.note(result)
            return False
        return _answer(this, result)
    session, text = this.session, this.attached + line
    if session.model.template is None:
        if not text.strip():
            return _answer(this, _begin(session, None, this.sampling))
        session.reset()  # each text is continued on its own
    elif not text.strip():
        return False
    # an attachment that does not fit is discarded, or every later message would fail
    attached, this.attached = this.attached, ""
    try:
        generation = _begin_with_room(this, text)
    except InputError as problem:
        if not attached:
            raise
        raise InputError(
            f"{problem.message}; the text kept by /read is discarded", field=problem.field,
            remedy=problem.remedy,
        ) from None  # fmt: skip
    stopped = _answer(this, generation)
    if attached and stopped and not generation.result.tokens:
        this.attached = attached
        output.note("the text kept by /read is kept for the next message")
    if warning := notice(session):
        output.note(warning)
    return stopped


def _begin_with_room(this: Chat, text: str) -> Generation:
    """Answer a message; leave out the oldest turns if they would not fit."""
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
def save_on_hangup(session: Session) -> Iterator[list[int]]:
    """Let SIGHUP and SIGTERM stop an answer, save the conversation, then end the program.

    The list gets the signals. A closing terminal sends several: those soon after the first are
    ignored, or they would end the program while it saves. An exception raised where none can leave,
    such as a finalizer, is lost: an alarm raises it again.
    """
    signals: list[int] = []
    saving, tried = False, -math.inf

    def hang_up(number: int, frame: FrameType | None) -> None:
        nonlocal tried
        if number != signal.SIGALRM:
            signals.append(number)
        if saving or time.monotonic() - tried < AGAIN_S:
            return
        tried = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 1.1 * AGAIN_S)
        if not session.busy:
            raise HangUp(128 + signals[0])
        session.cancel()

    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGALRM)
    previous = [signal.signal(number, hang_up) for number in numbers]
    try:
        try:
            yield signals
        except OSError:
            # writing to a terminal that is gone fails, sometimes before the signal arrives
            signals.append(signal.SIGHUP)
            raise HangUp(128 + signals[0]) from None
    except HangUp:
        saving = True
        _save(session)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _save(session: Session) -> None:
    if not session.position:
        return
    # nobody may be left to read either line
    with suppress(OSError):
        try:
            path = files.hung_up()
            session.save(path)
            output.note(f"saved the conversation: /load {path.stem} resumes it")
        except EdgeError as problem:
            output.complain(problem)
