"""One question, one answer: `-p`, or text on standard input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edge.apps.chat import output
from edge.errors import InputError

if TYPE_CHECKING:
    from types import FrameType

    from edge.apps.chat.gain import Gain
    from edge.runtime.generate import Generation
    from edge.runtime.session import Session

NO_TEMPLATE = "note: this model has no chat template, so it continues the text instead of answering"
MAX_INPUT = 64 << 20  # bytes read from a pipe


def given_prompt(option: str | None) -> str | None:
    """The prompt of -p, else of a pipe, else None: a person is at the terminal."""
    if option is not None:
        return option
    if sys.stdin is None:  # closed: nobody is there, and nothing was asked
        return ""
    if sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read(MAX_INPUT + 1)
    if len(data) > MAX_INPUT:
        raise InputError(f"is larger than {MAX_INPUT} bytes", field="standard input")
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as problem:
        raise InputError(
            f"is not UTF-8 at byte {problem.start}", field="standard input", remedy="send UTF-8"
        ) from None


def begin(session: Session, text: str | None, sampling: Mapping[str, Any]) -> Generation:
    """Start an answer, or with a base model a continuation; None goes on from the last one."""
    if session.model.template is None or text is None:
        return session.generate(text, **sampling)
    return session.chat(text, **sampling)


def answer(
    session: Session,
    prompt: str,
    sampling: Mapping[str, Any],
    gain: Gain | None = None,
) -> bool:
    """Write the answer to standard output; whether it was interrupted.

    `gain`: of drafting, where the session drafts.
    """
    output.prepare()
    if session.model.template is None:
        output.note(NO_TEMPLATE)
    if not prompt:
        raise InputError("is empty", field="prompt", remedy="give some text with -p or a pipe")
    stream = output.Stream(sys.stdout)
    generation = begin(session, prompt, sampling)
    with stopping(session):
        for piece in generation:
            stream.write(piece)
    stream.end()
    result = generation.result
    times = gain.add(result) if gain else None
    output.note(output.figures(result, session, gain, times))
    return result.finish_reason == "cancelled"


@contextmanager
def stopping(session: Session) -> Iterator[None]:
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
