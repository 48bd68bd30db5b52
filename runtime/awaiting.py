"""Support for `asyncio`: the model runs in a worker thread, so the event loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

T = TypeVar("T")


def next_piece(pieces: Iterator[str | None], hold: AbstractContextManager[None]) -> str | None:
    """Return the next piece of an answer, or None after the last."""
    with hold:
        for piece in pieces:
            if piece is not None:
                return piece
    return None


async def in_worker(
    work: Callable[[], T], cancel: Callable[[], None], close: Callable[[], None]
) -> T:
    """Run `work` on an answer in a worker thread of the event loop.

    If the task is cancelled, `cancel` ends the answer. `close` is called once the current step or
    chunk has finished.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        while not running.done():  # a second cancellation must not leave the session in use
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # retrieve it: nobody else awaits this future
        close()
        raise
