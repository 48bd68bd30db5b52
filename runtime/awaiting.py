"""Answers for `asyncio`: the model runs in a worker thread, and the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

T = TypeVar("T")


def next_piece(pieces: Iterator[str], hold: AbstractContextManager[None]) -> str | None:
    """The next piece of an answer, None after the last."""
    with hold:
        return next(pieces, None)


async def in_worker(
    work: Callable[[], T], cancel: Callable[[], None], close: Callable[[], None]
) -> T:
    """Run `work` on an answer in a worker thread of the event loop.

    When the task is cancelled, so is the answer by `cancel`; `close` comes once the step or chunk
    it is in has ended.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel()
        while not running.done():  # no second cancellation may leave the session in use
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # for an answer without a waiter
        close()
        raise
