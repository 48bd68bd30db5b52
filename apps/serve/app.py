"""The routes of the API, and how answers are sent."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import edge
from edge.apps.measure import machine
from edge.apps.serve import ollama, requests, responses
from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.errors import ApiError, busy, internal, of_edge_error
from edge.apps.serve.exchange import Exchange
from edge.apps.serve.guard import Guard
from edge.apps.serve.jobs import Asked, Ended, Piece, Served
from edge.apps.serve.metrics import CONTENT_TYPE, Sample
from edge.apps.serve.ollama import KINDS, Kind, only_loaded
from edge.apps.serve.page import page
from edge.apps.serve.protocol import KNOWN
from edge.apps.serve.reader import Reader
from edge.apps.serve.requests import ParsedRequest
from edge.apps.serve.responses import KeptResponses, ResponseRequest
from edge.apps.serve.settings import ServerSettings
from edge.apps.serve.wire import (
    JsonResponse,
    StreamedAnswer,
    check_media,
    failed,
    preflight,
    read_body,
    refused,
    unroutable,
)
from edge.apps.serve.worker import ModelWorker
from edge.apps.terminal import say, tell_traceback
from edge.bundle import store
from edge.errors import EdgeError
from edge.runtime.joined import JoinedEngine

_KEYLESS = {"/", "/health"}  # routes without a key: an empty page, and whether the server is ready
_UNLOGGED = {"/health", "/metrics"}  # polled by supervisors, so not logged
Read = Callable[..., Asked]  # reads a request; takes `model` and `max_tokens` by name
_COMMON_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class App:
    """ASGI application that answers requests through the worker, on one event loop."""

    def __init__(self, settings: ServerSettings, worker: ModelWorker) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._worker = worker
        self._guard = Guard(settings)
        self._began = int(time.time())
        self._inside: Counter[str] = Counter()  # requests per client: read, waiting or answered
        self._reader = Reader()
        self._kept = KeptResponses()
        self._page_file = page()
        self._starlette = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/", self._page),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/api/tags", self._tags),
                Route("/api/ps", self._loaded),
                Route("/api/show", self._show, methods=["POST"]),
                Route("/api/version", _version),
                Route(responses.PATH, self._respond, methods=["POST"]),
                *(
                    Route(path, partial(self._generate, kind=kind), methods=["POST"])
                    for path, kind in KINDS.items()
                ),
            ],
            exception_handlers={ApiError: refused, HTTPException: unroutable, Exception: failed},
        )
        self._starlette.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extra_headers, began = dict(_COMMON_HEADERS), time.monotonic()
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(extra_headers)
            await send(message)

        request = Request(scope)
        try:
            self._guard.check_head(request)
            if origin := self._guard.check_origin(request):
                extra_headers |= {"access-control-allow-origin": origin, "vary": "origin"}
            if origin and request.method == "OPTIONS":
                await preflight()(scope, receive, send_with_headers)
                return
            if request.scope["path"] not in _KEYLESS:
                self._guard.check_key(request)
                scope[KNOWN] = True
            await self._starlette(scope, receive, send_with_headers)
        except ApiError as problem:
            await refused(request, problem)(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass
        except Exception:  # a bug of ours, answered already
            tell_traceback()
        finally:
            # only existing routes: made-up paths must not fill the memory
            route = scope.get("route")
            path = getattr(route, "path", "other")
            self._worker.metrics.requested(path, status)
            if self._settings.log and path not in _UNLOGGED:
                self._log_request(request, status, time.monotonic() - began)

    def _log_request(self, request: Request, status: int, took_s: float) -> None:
        """Log a request: client, route and outcome, but no text."""
        client = request.scope.get("client")
        entry = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": client[0] if client else None,
            "method": request.method,
            "path": request.scope["path"][:200],
            "status": status,  # 0: the client left before a response
            "seconds": round(took_s, 3),
            **request.scope.get("edge", {}),
        }
        with suppress(OSError):  # nobody may be left to read it
            say(json.dumps(entry), file=sys.stderr, flush=True)

    async def _health(self, request: Request) -> Response:
        state = self._worker.state
        if state == "ready" and self._reader.stuck:
            state = "stuck"  # a supervisor may restart the server
        if state == "ready":
            return JsonResponse({"status": "ok"})
        return JsonResponse({"status": state}, 503, {"retry-after": "2"})

    async def _page(self, request: Request) -> Response:
        body, headers = self._page_file
        return Response(body, headers=headers)

    async def _metrics(self, request: Request) -> Response:
        worker = self._worker
        gauges: list[Sample] = [
            ("edge_requests_inside", {}, self._inside.total()),
            ("edge_requests_waiting", {}, worker.waiting),
            ("edge_requests_running", {}, worker.running),
            ("edge_reader_stuck", {}, self._reader.stuck),
        ]
        if (served := worker.served) is not None:
            model = {"model": worker.name}
            gauges += [
                ("edge_batch_size", model, _batch_size(served)),
                ("edge_state_bytes", model, served.slots.state_bytes),
                ("edge_kept_state_bytes", model, served.slots.store.nbytes),
            ]
        gauges += [
            ("edge_temperature_celsius", {"sensor": sensor}, degrees)
            for sensor, degrees in machine.conditions().temperatures_c.items()
        ]
        headers = {"content-type": CONTENT_TYPE}
        return Response(worker.metrics.text(gauges), headers=headers)

    async def _models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": list(map(self._describe, self._names()))})

    async def _model(self, request: Request) -> Response:
        return JsonResponse(self._describe(self._served_name(request.path_params["name"])))

    async def _tags(self, request: Request) -> Response:
        models = []
        for name in self._names():
            with suppress(EdgeError, OSError):  # leave out a damaged one
                models.append(ollama.listed(name, self._folder(name)))
        return JsonResponse({"models": models})

    async def _loaded(self, request: Request) -> Response:
        models = []
        if (served := self._worker.served) is not None:
            model, state_bytes = served.model, served.slots.state_bytes + served.slots.store.nbytes
            with suppress(EdgeError, OSError):
                models.append(ollama.running(self._worker.name, model, state_bytes))
        return JsonResponse({"models": models})

    async def _show(self, request: Request) -> Response:
        check_media(request)
        fields = requests.parse(await read_body(request, self._limits.body_bytes))
        name = fields.get("model") or fields.get("name")  # as older clients write it
        if isinstance(name, str):
            name = name.removesuffix(":latest")
        try:
            return JsonResponse(ollama.show(self._folder(self._served_name(name))))
        except EdgeError as problem:  # damaged, or removed meanwhile
            raise of_edge_error(problem) from None

    def _folder(self, name: str) -> Path:
        """Return the folder of a served model."""
        return self._settings.folder if name == self._settings.name else store.folder() / name

    def _describe(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._began, "owned_by": "edge"}

    def _names(self) -> list[str]:
        """Return the names of the served models, the first model first."""
        first, pulled = self._settings.name, []
        if self._settings.pulled:
            with suppress(OSError):
                pulled = store.names()
        return [first, *(name for name in pulled if name != first)]

    def _served_name(self, name: Any) -> str:
        """Return the name of a served model; requests without one mean the first."""
        if not isinstance(name, str):
            return self._settings.name  # a value of another type is refused with the other fields
        if name not in (names := self._names()):
            raise ApiError(
                404, f"unknown model {name!r:.100}; this server has {', '.join(names[:20])}",
                code="model_not_found", param="model",
            )  # fmt: skip
        return name

    async def _respond(self, request: Request) -> Response:
        response_request = ResponseRequest(self._kept)
        try:
            return await self._generate(request, kind=response_request.kind())
        except ApiError as problem:
            raise response_request.named(problem) from None

    async def _generate(self, request: Request, *, kind: Kind) -> Response:
        until = time.monotonic() + self._limits.deadline_s
        check_media(request)
        self._worker.check_ready()
        client = request.client.host if request.client else ""
        self._check_room(client)
        # a request whose body trickles in must not take a place
        body = await read_body(request, self._limits.body_bytes)
        self._check_room(client)
        with ExitStack() as resources:
            self._inside[client] += 1
            resources.callback(self._leave, client)
            fields = await self._reader.read(partial(requests.parse, body), until)
            translated = kind.given(fields)
            name = self._served_name(translated.get("model"))
            if (empty := kind.loads(fields)) is not None:
                await self._obtain(name, until, client)
                return JsonResponse(only_loaded(fields, name, empty))
            read: Read = partial(requests.read, translated, chat=kind.chat(fields))
            if kind.embeds is not None:
                read = partial(requests.read_embeddings, translated)
            served, parsed = await self._read(read, name, until, client)
            exchange = resources.enter_context(
                Exchange(self._worker, parsed, until, request.receive, served, client)
            )
            # nothing is sent before the first event, so that refusals have a status of their own
            if kind.embeds is not None:
                embedded = await exchange.vectors()
                request.scope["edge"] = {"prompt_tokens": embedded.asked.count}
                return JsonResponse(kind.embeds(embedded, name))
            assert isinstance(parsed, ParsedRequest)
            event = await exchange.next()
            form = kind.form(parsed, name, served.model)
            if parsed.stream:
                chunks = answer_chunks(form, event, exchange, parsed, request.scope)
                return StreamedAnswer(chunks, form.media_type, resources.pop_all())
            pieces: list[Piece] = []
            while isinstance(event, Piece):
                pieces.append(event)
                event = await exchange.next()
            request.scope["edge"] = _figures(parsed, event)
            return JsonResponse(form.whole(pieces, event))

    def _check_room(self, client: str) -> None:
        """Raise ApiError 429 if too many requests are inside.

        A client without any inside has as many places again.
        """
        inside = self._inside.total()
        limit = self._limits.waiting + self._worker.parallel - 1
        if inside > limit and (self._inside[client] or inside > 2 * limit):
            raise busy(
                f"{inside} requests are running or waiting already", "overloaded",
                self._worker.retry_s(inside), 429,
            )  # fmt: skip

    def _leave(self, client: str) -> None:
        self._inside[client] -= 1
        if not self._inside[client]:
            del self._inside[client]

    async def _obtain(self, name: str, until: float, client: str) -> Served:
        try:
            return await self._worker.obtain(name, until, client)
        except EdgeError as problem:
            raise of_edge_error(problem) from None

    async def _read(self, read: Read, name: str, until: float, client: str) -> tuple[Served, Asked]:
        served = await self._obtain(name, until, client)
        try:
            limit = self._limits.prompt_tokens
            if served.slots.capacity is not None:
                limit = min(limit, served.slots.capacity)
            reading = partial(read, model=served.model, max_tokens=limit)
            return served, await self._reader.read(reading, until)
        except EdgeError as problem:
            raise of_edge_error(problem) from None


async def answer_chunks(
    form: AnswerFormat,
    event: Piece | Ended,
    exchange: Exchange,
    parsed: ParsedRequest,
    scope: Scope,
) -> AsyncIterator[bytes]:
    """Yield the answers as chunks; an error becomes a chunk too, once the stream has begun."""
    for opening in form.opening():
        yield form.line(opening)
    try:
        while isinstance(event, Piece):
            if chunk := form.piece(event):
                yield form.line(chunk)
            event = await exchange.next()
        scope["edge"] = _figures(parsed, event)
        for chunk in form.closing(event):
            yield form.line(chunk)
    except ClientDisconnect:
        raise
    except ApiError as problem:
        yield form.line(form.failure(problem))
        return
    except Exception:  # the status was sent: only an event can still report it
        tell_traceback()
        yield form.line(form.failure(internal()))
        return
    yield form.end


def _figures(parsed: ParsedRequest, ended: Ended) -> dict[str, Any]:
    """Return the figures of answers for the log."""
    first = ended.results[0]
    return {
        "prompt_tokens": len(parsed.tokens),
        "reused_tokens": ended.reused,
        "generated_tokens": sum(len(result.tokens) for result in ended.results),
        "finish_reason": first.finish_reason,
        "prompt_s": round(first.timings.prompt_s, 4),
    }


def _batch_size(served: Served) -> int:
    engine = served.model.engine
    return engine.size if isinstance(engine, JoinedEngine) else 1


async def _version(request: Request) -> Response:
    return JsonResponse({"version": edge.__version__})
