"""Acknowledge Ctrl-C and SIGTERM at once and obey them soon, whatever the program is doing.

Python runs a signal handler between two bytecode instructions, so a matrix product in torch or a
run of ONNX Runtime can delay it for many seconds. Here each signal's number is written to a pipe. A
thread reads the pipe, acknowledges the signal and, after `PATIENCE_S`, removes the files being
written and ends the process.

Handlers that a program installs itself are left alone. A handler with an attribute `said` ends a
long run in order: the thread prints `said`, and a second signal ends the process as above.
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

PATIENCE_S = 0.5  # until the process ends; exit functions may then take as long again


def leave(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: exit in order, so that files being written are removed."""
    sys.exit(128 + number)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    pass


# after these the thread ends the process
_OURS = (signal.default_int_handler, leave, _leave_to_thread)
_watched = False


@contextmanager
def obeyed() -> Iterator[None]:
    """Watch signals inside this context."""
    global _watched
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    acknowledged, finished = threading.Event(), threading.Event()
    threading.Thread(
        target=_watch, args=(read_end, acknowledged, finished), name="edge-signals", daemon=True
    ).start()
    _watched = True
    try:
        yield
    finally:
        _watched = False
        signal.set_wakeup_fd(previous_fd)
        os.close(write_end)
        finished.set()
        acknowledged.wait(PATIENCE_S)


def _after_fork() -> None:
    """Stop watching in a forked child: its signals would go to the parent's pipe and end it."""
    global _watched
    _watched = False
    if signal.getsignal(signal.SIGTERM) is leave:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)


def unwatched() -> None:
    """Leave signals to the program from now on: in a chat, Ctrl-C only stops an answer."""
    global _watched
    _watched = False
    signal.set_wakeup_fd(-1)


@contextmanager
def raising_nothing() -> Iterator[None]:
    """Let the thread alone obey signals inside this context, without an exception.

    While torch is loaded, C++ calls Python: an exception there would abort the process.
    """
    if not _watched or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ours = {number: handler for number, handler in handlers.items() if handler in _OURS}
    try:
        for number in ours:
            signal.signal(number, _leave_to_thread)
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _leave_to_child(number: int, frame: FrameType | None) -> None:
    pass


@contextmanager
def left_to_child() -> Iterator[None]:
    """Leave Ctrl-C to a child process on the same terminal, which gets it too and says so."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    # a function, not SIG_IGN, which the child would inherit
    signal.signal(signal.SIGINT, _leave_to_child)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _watch(read_end: int, acknowledged: threading.Event, finished: threading.Event) -> None:
    warned: Callable[..., Any] | None = None
    while numbers := os.read(read_end, 64):
        for number in numbers:
            handler: Any = signal.getsignal(number)
            if handler in _OURS or handler is warned:
                if number == signal.SIGINT:
                    say("interrupted", file=sys.stderr, flush=True)
                acknowledged.set()
                if finished.wait(PATIENCE_S):
                    break
                end(128 + number)
            elif message := getattr(handler, "said", None):
                warned = handler
                say(message, file=sys.stderr, flush=True)
    acknowledged.set()
    os.close(read_end)


def end(code: int) -> NoReturn:
    """End the process now, without the slow normal shutdown."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h")  # show the cursor that a progress bar has hidden
    with suppress(OSError):  # errors caused by the removal of files are no news
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    leftovers.remove_held()
    # these remove temporary folders and end child processes
    ending = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    ending.start()
    ending.join(PATIENCE_S)
    os._exit(code)
