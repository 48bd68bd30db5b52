"""The routes of the API, and how an answer travels from the model's thread to its client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from edge.apps.serve import requests
from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.errors import ApiError, busy, encode, internal, of_edge_error, too_late
from edge.apps.serve.guard import Guard, header
from edge.apps.serve.reader import Reader
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.settings import ServerSettings
from edge.apps.serve.worker import Ended, Event, Job, ModelWorker, Piece
from edge.apps.terminal import tell_traceback
from edge.errors import EdgeError

MAX_BEHIND = 1 << 16  # pieces of text that a client may have left unread
_OPEN = {"/health"}  # routes without a key: they say only whether the server is ready
_EVERYWHERE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class App:
    """Answers requests with what the worker makes of them. Lives on one event loop."""

    def __init__(self, settings: ServerSettings, worker: ModelWorker) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._worker = worker
        self._guard = Guard(settings)
        self._began = int(time.time())
        self._inside = 0  # requests that are being read, waiting or answered
        self._reader = Reader()
        self._starlette = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/chat/completions", partial(self._generate, chat=True), methods=["POST"]),
                Route("/v1/completions", partial(self._generate, chat=False), methods=["POST"]),
            ],
            exception_handlers={ApiError: _refused, HTTPException: _unroutable, Exception: _failed},
        )
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extra = dict(_EVERYWHERE)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(extra)
            await send(message)

        request = Request(scope)
        try:
            self._guard.check_head(request)
            if origin := self._guard.check_origin(request):
                extra |= {"access-control-allow-origin": origin, "vary": "origin"}
            if origin and request.method == "OPTIONS":
                await _preflight()(scope, receive, sending)
                return
            if request.scope["path"] not in _OPEN:
                self._guard.check_key(request)
            await self._starlette(scope, receive, sending)
        except ApiError as problem:
            await _refused(request, problem)(scope, receive, sending)
        except ClientDisconnect:
            pass
        except Exception:  # answered already: a fault of ours must not look like silence
            tell_traceback()

    # -- what can be seen ------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        state = self._worker.state
        if state == "ready" and self._reader.stuck:
            state = "stuck"  # a supervisor may start another
        if state == "ready":
            return _Json({"status": "ok"})
        return _Json({"status": state}, 503, {"retry-after": "2"})

    async def _models(self, request: Request) -> Response:
        return _Json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._settings.name:
            raise ApiError(404, f"unknown model {name!r:.100}", code="model_not_found")
        return _Json(self._described())

    def _described(self) -> dict[str, Any]:
        name = self._settings.name
        return {"id": name, "object": "model", "created": self._began, "owned_by": "edge"}

    # -- answers ---------------------------------------------------------------------------------

    async def _generate(self, request: Request, *, chat: bool) -> Response:
        until = time.monotonic() + self._limits.deadline_s
        _check_media(request)
        self._worker.check_ready()
        self._check_room()
        # whose body trickles in takes nobody's place
        body = await _body(request, self._limits.body_bytes)
        self._check_room()
        with ExitStack() as held:
            self._inside += 1
            held.callback(self._leave)
            asked = await self._read(body, chat, until)
            model = self._worker.check_ready()
            answer = held.enter_context(Exchange(self._worker, asked, until, request.receive))
            form = AnswerFormat(asked, self._settings.name, model)
            # nothing is sent before something was made, so that refusals have a status of their own
            event = await answer.next()
            if asked.stream:
                return _EventStream(_chunks(form, event, answer), held.pop_all())
            pieces: list[Piece] = []
            while isinstance(event, Piece):
                pieces.append(event)
                event = await answer.next()
            return _Json(form.whole(pieces, event))

    def _check_room(self) -> None:
        if self._inside > self._limits.waiting:
            raise busy(
                f"{self._inside} requests are waiting already", "overloaded",
                self._worker.retry_s(self._inside),
            )  # fmt: skip

    def _leave(self) -> None:
        self._inside -= 1

    async def _read(self, data: bytes, chat: bool, until: float) -> ParsedRequest:
        most = self._limits.prompt_tokens
        if self._worker.capacity is not None:
            most = min(most, self._worker.capacity)
        read = partial(
            requests.read, data, chat=chat, model=self._worker.check_ready(),
            name=self._settings.name, max_tokens=most,
        )  # fmt: skip
        try:
            return await self._reader.read(read, until)
        except EdgeError as problem:
            raise of_edge_error(problem) from None


class Exchange:
    """One answer: what the worker makes of it, until it ends, its time is over or the client left.

    Leaving the context cancels it; nothing happens when it has ended.
    """

    def __init__(
        self, worker: ModelWorker, asked: ParsedRequest, until: float, receive: Receive
    ) -> None:
        """Submits the request. `until`: on the monotonic clock. Raises ApiError 503."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | ClientDisconnect] = asyncio.Queue()
        self._job = Job(asked, until, self._post)
        worker.submit(self._job)
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._gone.add_done_callback(self._vanished)
        self._timer = self._loop.call_later(until - time.monotonic(), self._expire)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._gone.remove_done_callback(self._vanished)
        self._gone.cancel()
        self._job.cancel()

    async def next(self) -> Piece | Ended:
        """The next piece of text, or the end. Raises ApiError; ClientDisconnect."""
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _post(self, event: Event) -> None:
        """From the worker's thread."""
        with suppress(RuntimeError):  # the loop has been closed: nobody is waiting
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: Event) -> None:
        self._events.put_nowait(event)
        if self._events.qsize() > MAX_BEHIND:
            self._job.cancel()

    def _vanished(self, _: object) -> None:
        self._job.cancel()
        self._events.put_nowait(ClientDisconnect())

    def _expire(self) -> None:
        if not self._job.begun:
            self._job.cancel()
            self._events.put_nowait(too_late("the deadline passed before the request's turn came"))


async def _disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection; only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _chunks(
    form: AnswerFormat, event: Piece | Ended, answer: Exchange
) -> AsyncIterator[bytes]:
    """The answers as server-sent events; an error, too, once they have begun."""
    for opening in form.opening():
        yield _event(opening)
    try:
        while isinstance(event, Piece):
            if chunk := form.piece(event):
                yield _event(chunk)
            event = await answer.next()
        for chunk in form.closing(event):
            yield _event(chunk)
    except ClientDisconnect:
        raise
    except ApiError as problem:
        yield _event(problem.body())
        return
    except Exception:  # the status was sent: an event is all that can still tell
        tell_traceback()
        yield _event(internal().body())
        return
    yield b"data: [DONE]\n\n"


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + encode(payload) + b"\n\n"


# -- requests and responses ----------------------------------------------------------------------


class _Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return encode(content)


class _EventStream(StreamingResponse):
    """Server-sent events. `held` is left when the last one is sent, or cannot be sent."""

    def __init__(self, chunks: AsyncIterator[bytes], held: ExitStack) -> None:
        # a buffering proxy would keep the text back
        headers = {"x-accel-buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # not the class's own: it would wait for the end of the connection beside `Exchange`, and of
        # two that wait one hears nothing
        with self._held:
            await self.stream_response(send)


def _check_media(request: Request) -> None:
    kind = (header(request, "content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "the body must be sent as content-type: application/json",
            code="unsupported_media_type",
        )  # fmt: skip
    if header(request, "content-encoding") not in (None, "identity"):
        raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")


async def _body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError beyond `limit` bytes, ClientDisconnect."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    declared = header(request, "content-length")
    if declared is not None and int(declared) > limit:  # h11 has checked that it is a number
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _preflight() -> Response:
    """What a browser asks before a page of an allowed origin may call."""
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        },
    )


def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return _Json(problem.body(), problem.status, problem.headers)


def _unroutable(request: Request, problem: Exception) -> Response:
    """A path that no route has, or a method that a route does not take."""
    assert isinstance(problem, HTTPException)
    path = request.scope["path"]
    if problem.status_code == 405:
        message, code = f"{path!r:.100} does not take {request.method}", "method_not_allowed"
    else:
        message, code = f"unknown URL {path!r:.100}", "unknown_url"
    headers = {name.lower(): value for name, value in (problem.headers or {}).items()}
    return _refused(request, ApiError(problem.status_code, message, code=code, headers=headers))


def _failed(request: Request, problem: Exception) -> Response:
    return _refused(request, internal())
