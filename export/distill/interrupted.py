"""How a long run is asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C, collected as they come, so that the run ends between two steps."""
    received: list[int] = []
    names = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(name, lambda number, _: received.append(number)) for name in names]
    try:
        yield received
    finally:
        for name, handler in zip(names, before, strict=True):
            signal.signal(name, handler)
