"""Stop a long run by a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# printed at once, because finishing the step and saving take a while
SAID = "stopping after this step, saving all progress; a second signal stops at once without saving"


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in a list, so that the run can end between two steps.

    The second signal raises KeyboardInterrupt.
    """
    received: list[int] = []
    names = (signal.SIGTERM, signal.SIGINT)

    def receive(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    receive.said = SAID  # type: ignore[attr-defined]
    before = [signal.signal(name, receive) for name in names]
    try:
        yield received
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
