"""Ctrl-C and SIGTERM are acknowledged at once and obeyed soon, whatever the program is doing.

Python runs a signal's handler between two of its own instructions: a product of torch or a run of
ONNX Runtime can keep it waiting for many seconds. The number of a signal is written to a pipe when
it comes; a thread reads it there, says so, and after `PATIENCE_S` does what is left to do: what was
being written is removed, and the process ends.

A handler of the program's own is left alone. One with an attribute `said` ends a long run in order:
that is told, and the second signal ends the process as above.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from edge import leftovers
from edge.apps.terminal import say

PATIENCE_S = 0.5  # until the process ends; what is removed then takes as long at most


def leave(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM: end in order, so that what is being written is removed."""
    sys.exit(128 + number)


@contextmanager
def obeyed() -> Iterator[None]:
    """Signals are watched for as long as this lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    acknowledged, over = threading.Event(), threading.Event()
    threading.Thread(
        target=_watch, args=(heard, acknowledged, over), name="edge-signals", daemon=True
    ).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)
        over.set()
        acknowledged.wait(PATIENCE_S)


def _forked() -> None:
    """Leave signals to a forked child itself: its pipe is its parent's, which would end by them."""
    if signal.getsignal(signal.SIGTERM) is leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forked)


def unwatched() -> None:
    """From now on the program obeys signals itself: to a talk, one is no more than a stop."""
    signal.set_wakeup_fd(-1)


def _watch(heard: int, acknowledged: threading.Event, over: threading.Event) -> None:
    warned: Callable[..., Any] | None = None
    while numbers := os.read(heard, 64):
        for number in numbers:
            handler: Any = signal.getsignal(number)
            if handler in (signal.default_int_handler, leave) or handler is warned:
                if number == signal.SIGINT:
                    say("interrupted", file=sys.stderr, flush=True)
                acknowledged.set()
                if over.wait(PATIENCE_S):
                    break
                end(128 + number)
            elif said := getattr(handler, "said", None):
                warned = handler
                say(said, file=sys.stderr, flush=True)
    acknowledged.set()
    os.close(heard)


def end(code: int) -> NoReturn:
    """End the process now, which by itself would take long."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # a bar that is gone had hidden the cursor
    with suppress(OSError):  # what fails now because files are gone is no news
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    leftovers.remove_held()
    # temporary folders, and children that are to end with us
    ending = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    os._exit(code)
