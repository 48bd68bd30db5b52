"""The thread that reads requests: it parses, checks and encodes them, one after the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from edge.apps.serve.errors import too_late

STUCK_S = 10.0  # for one request, after which /health reports `stuck`
Read = TypeVar("Read")


class Reader:
    """Runner of work beside the event loop. Work that does not end in time is left in its thread.

    Encoding in a library cannot be interrupted. Other work continues in a new thread, and the
    process does not wait for the old one.
    """

    def __init__(self) -> None:
        self._abandoned: list[threading.Thread] = []
        self._start_thread()

    def _start_thread(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._since: float | None = None
        self._thread = threading.Thread(
            target=self._main, args=(self._work,), name="edge-reader", daemon=True
        )
        self._thread.start()

    def _main(self, work: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := work.get()) is not None:
            self._since = time.monotonic()
            task()
            if work is not self._work:  # left behind meanwhile
                return
            self._since = None

    @property
    def stuck(self) -> bool:
        """Whether reading takes longer than STUCK_S, or work that was left behind still runs."""
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        since = self._since
        return bool(self._abandoned) or (since is not None and time.monotonic() - since > STUCK_S)

    async def read(self, work: Callable[[], Read], until: float) -> Read:
        """Return or raise what `work` does; ApiError 504 after `until`, on the monotonic clock."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Read] = loop.create_future()
        running = threading.Event()

        def finish(call: Callable[..., None], value: object) -> None:
            if not done.done():
                call(value)

        def perform() -> None:
            if time.monotonic() > until:  # nobody waits for it any more
                return
            running.set()
            try:
                outcome: tuple[Callable[..., None], object] = done.set_result, work()
            except BaseException as problem:
                outcome = done.set_exception, problem
            try:
                loop.call_soon_threadsafe(finish, *outcome)
            except RuntimeError:  # the loop has been closed
                return

        self._work.put(perform)
        try:
            return await asyncio.wait_for(done, max(0.0, until - time.monotonic()))
        except asyncio.TimeoutError:
            if running.is_set():
                self._replace_thread()
            raise too_late("the deadline passed before the request was read") from None

    def _replace_thread(self) -> None:
        """Continue in another thread."""
        old_thread, old_work = self._thread, self._work
        self._start_thread()
        with suppress(Empty):
            while True:
                self._work.put(old_work.get_nowait())
        old_work.put(None)
        self._abandoned.append(old_thread)
