"""How a long run is asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# programs tell it at once: a step, and keeping what it learned, take a while
SAID = "stopping after this step, with all that was learned; a second time ends at once, without it"


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C, collected as they come, so that the run ends between two steps.

    The second one raises KeyboardInterrupt.
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
