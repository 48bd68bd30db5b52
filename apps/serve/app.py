"""The routes, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from edge.apps.serve import prompts
from edge.apps.serve.answers import Shape
from edge.apps.serve.errors import ApiError, busy, internal, of_edge_error, too_late
from edge.apps.serve.guard import Guard
from edge.apps.serve.http import Call, Gone, Receive, Scope, Send
from edge.apps.serve.prompts import Ask
from edge.apps.serve.settings import Settings
from edge.apps.serve.worker import Ended, Event, Job, Worker
from edge.errors import EdgeError

Handler = Callable[[Call], Awaitable[None]]
MAX_BEHIND = 1 << 16  # pieces of text that a client may have left unread
_OPEN = {"/health"}  # routes without a key: they say only whether the server is ready


class App:
    """Answers requests with what the worker makes of them. Lives on one event loop."""

    def __init__(self, settings: Settings, worker: Worker) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._worker = worker
        self._guard = Guard(settings)
        self._began = int(time.time())
        self._inside = 0  # requests that are being read, waiting or answered
        # prompts are encoded beside the event loop, one at a time
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="edge-reader")
        model = f"/v1/models/{settings.name}"
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/v1/models": {"GET": self._models},
            model: {"GET": self._model},
            "/v1/chat/completions": {"POST": lambda call: self._generate(call, chat=True)},
            "/v1/completions": {"POST": lambda call: self._generate(call, chat=False)},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            await self._handle(call)
        except Gone:
            pass
        except ApiError as problem:
            await call.fail(problem)
        except Exception:  # a fault of ours must not look like silence
            traceback.print_exc()
            await call.fail(internal())

    async def _handle(self, call: Call) -> None:
        call.check_head(self._limits.header_bytes)
        self._guard.check_host(call.header("host"))
        origin = self._guard.check_origin(call.header("origin"))
        if origin is not None:
            call.extra.update({"access-control-allow-origin": origin, "vary": "origin"})
            if call.method == "OPTIONS":
                await _allow(call)
                return
        if call.path not in _OPEN:
            self._guard.check_key(call.header("authorization"))
        await self._route(call)(call)

    def _route(self, call: Call) -> Handler:
        methods = self._routes.get(call.path)
        if methods is None:
            if call.path.startswith("/v1/models/"):
                name = call.path.removeprefix("/v1/models/")
                raise ApiError(404, f"there is no model {name!r:.100}", code="model_not_found")
            raise ApiError(404, f"there is no {call.path!r:.100}", code="unknown_url")
        method = "GET" if call.method == "HEAD" else call.method
        if method not in methods:
            raise ApiError(
                405, f"{call.path} does not take {call.method}", code="method_not_allowed",
                headers={"allow": ", ".join(methods)},
            )  # fmt: skip
        return methods[method]

    # -- what can be seen ------------------------------------------------------------------------

    async def _health(self, call: Call) -> None:
        state = self._worker.state
        if state == "ready":
            await call.respond(200, {"status": "ok"})
        else:
            await call.respond(503, {"status": state}, {"retry-after": "2"})

    async def _models(self, call: Call) -> None:
        await call.respond(200, {"object": "list", "data": [self._described()]})

    async def _model(self, call: Call) -> None:
        await call.respond(200, self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._began,
            "owned_by": "edge",
        }

    # -- answers ---------------------------------------------------------------------------------

    async def _generate(self, call: Call, *, chat: bool) -> None:
        until = time.monotonic() + self._limits.deadline_s
        kind = (call.header("content-type") or "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415, "the body must be sent as content-type: application/json",
                code="unsupported_media_type",
            )  # fmt: skip
        if call.header("content-encoding") not in (None, "identity"):
            raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")
        self._worker.check_ready()
        if self._inside > self._limits.waiting:
            raise busy(
                f"{self._inside} requests are waiting already", "overloaded",
                self._worker.retry_s(self._inside),
            )  # fmt: skip
        self._inside += 1
        try:
            ask = await self._ask(await call.body(self._limits.body_bytes), chat)
            await self._answer(call, ask, until)
        finally:
            self._inside -= 1

    async def _ask(self, data: bytes, chat: bool) -> Ask:
        model = self._worker.check_ready()
        most = self._limits.prompt_tokens
        if self._worker.capacity is not None:
            most = min(most, self._worker.capacity)

        def read() -> Ask:
            return prompts.read(
                data,
                chat=chat,
                model=model,
                name=self._settings.name,
                max_tokens=most,
            )

        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, read)
        except EdgeError as problem:
            raise of_edge_error(problem) from None

    async def _answer(self, call: Call, ask: Ask, until: float) -> None:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | Gone] = asyncio.Queue()

        def deliver(event: Event) -> None:
            events.put_nowait(event)
            if events.qsize() > MAX_BEHIND:
                job.cancel()

        def post(event: Event) -> None:
            """From the worker's thread."""
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is waiting
                loop.call_soon_threadsafe(deliver, event)

        job = Job(ask, until, post)
        self._worker.submit(job)

        def vanished(_: object) -> None:
            job.cancel()
            events.put_nowait(Gone())

        def expire() -> None:
            if not job.begun:
                job.cancel()
                events.put_nowait(too_late("the request's time was over before its turn came"))

        gone = asyncio.ensure_future(call.gone())
        gone.add_done_callback(vanished)
        timer = loop.call_later(until - time.monotonic(), expire)
        try:
            model = self._worker.check_ready()
            shape = Shape(ask, self._settings.name, model.fingerprint)
            await (_stream if ask.stream else _whole)(call, shape, events)
        finally:
            timer.cancel()
            gone.remove_done_callback(vanished)
            gone.cancel()
            job.cancel()  # nothing happens when it has ended


async def _whole(call: Call, shape: Shape, events: asyncio.Queue[Event | Gone]) -> None:
    parts: list[str] = []
    while True:
        event = await events.get()
        if isinstance(event, str):
            parts.append(shape.shown(event))
        elif isinstance(event, Ended):
            await call.respond(200, shape.whole("".join(parts), event))
            return
        else:
            raise event


async def _stream(call: Call, shape: Shape, events: asyncio.Queue[Event | Gone]) -> None:
    """Nothing is sent before something was made, so that refusals have a status of their own."""
    while True:
        event = await events.get()
        if isinstance(event, Exception):
            raise event
        if not call.started and (opening := shape.opening()):
            await call.event(opening)
        if isinstance(event, str):
            if text := shape.shown(event):
                await call.event(shape.piece(text))
            continue
        for chunk in shape.closing(event):
            await call.event(chunk)
        await call.event("[DONE]")
        await call.end()
        return


async def _allow(call: Call) -> None:
    """What a browser asks before a page of an allowed origin may call."""
    await call.respond(
        204,
        None,
        {
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        },
    )
