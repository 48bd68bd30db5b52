"""One request between the event loop and the model's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from edge.apps.serve.errors import too_late
from edge.apps.serve.jobs import Asked, Embedded, Ended, Event, Job, Piece, Served
from edge.apps.serve.worker import ModelWorker

MAX_BEHIND = 1 << 16  # pieces of text that a client may leave unread
WAITED_FOR = 256  # the same while others wait for the model, besides what sockets hold
CATCH_UP_S = 1.0  # then the model waits so long for a client to read half of them


class Exchange:
    """Context of one answer, until it ends, its deadline passes or the client leaves.

    Leaving the context cancels the answer, unless it has ended.
    """

    def __init__(
        self,
        worker: ModelWorker,
        asked: Asked,
        until: float,
        receive: Receive,
        served: Served | None = None,
        client: str = "",
    ) -> None:
        """Submit the request of `client`. `until`: on the monotonic clock. Raises ApiError 503."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | ClientDisconnect] = asyncio.Queue()
        self._posted = self._taken = 0  # each is counted by one thread
        self._caught_up = threading.Event()
        self._worker = worker
        self._job = Job(asked, until, self._post, served, client)
        worker.submit(self._job)
        self._disconnection = asyncio.ensure_future(_disconnected(receive))
        self._disconnection.add_done_callback(self._on_disconnect)
        self._timer = self._loop.call_later(until - time.monotonic(), self._on_deadline)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._disconnection.remove_done_callback(self._on_disconnect)
        self._disconnection.cancel()
        self._job.cancel()
        self._caught_up.set()

    async def next(self) -> Piece | Ended:
        """Return the next piece of text, or the end. Raises ApiError or ClientDisconnect."""
        event = await self._event()
        assert not isinstance(event, Embedded)
        return event

    async def vectors(self) -> Embedded:
        """Return all vectors. Raises as `next` does."""
        event = await self._event()
        assert isinstance(event, Embedded)
        return event

    async def _event(self) -> Piece | Ended | Embedded:
        event = await self._events.get()
        self._taken += 1
        if self._unread <= WAITED_FOR // 2:
            self._caught_up.set()
        if isinstance(event, Exception):
            raise event
        return event

    def _post(self, event: Event) -> None:
        """Take an event in the worker's thread, and wait for a client that is behind."""
        self._posted += 1
        with suppress(RuntimeError):  # the loop has been closed: nobody is waiting
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        behind = self._falls_behind() if self._worker.waiting else self._unread > MAX_BEHIND
        if behind:
            self._job.cancel()

    @property
    def _unread(self) -> int:
        return self._posted - self._taken

    def _falls_behind(self) -> bool:
        """Return whether the client leaves more than WAITED_FOR pieces, given time to read them."""
        self._caught_up.clear()
        if self._unread <= WAITED_FOR or self._job.cancelled.is_set():
            return False
        return not self._caught_up.wait(CATCH_UP_S)

    def _on_disconnect(self, _: object) -> None:
        self._job.cancel()
        self._events.put_nowait(ClientDisconnect())

    def _on_deadline(self) -> None:
        if not self._job.begun:
            self._job.cancel()
            self._events.put_nowait(too_late("the deadline passed before the request's turn came"))


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection. Call it only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
