"""Reading the bodies of requests, and sending responses and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from edge.apps.serve.answers import AnswerFormat
from edge.apps.serve.errors import ApiError, encode, internal
from edge.apps.serve.guard import header
from edge.apps.serve.ollama import OllamaFormat


class JsonResponse(JSONResponse):
    """A response of JSON as this server encodes it."""

    def render(self, content: Any) -> bytes:
        return encode(content)


class StreamedAnswer(StreamingResponse):
    """A response of chunks. `held` is closed when the last one is sent, or sending fails."""

    def __init__(self, chunks: AsyncIterator[bytes], media: str, held: ExitStack) -> None:
        # a buffering proxy would hold the text back
        super().__init__(chunks, media_type=media, headers={"x-accel-buffering": "no"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # not super().__call__: like `Exchange`, it would wait for the end of the connection, and of
        # two waiters only one is told
        with self._held:
            await self.stream_response(send)


def check_media(request: Request) -> None:
    """Raise ApiError unless the headers declare the body as plain JSON."""
    kind = (header(request, "content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "the body must be sent as content-type: application/json",
            code="unsupported_media_type",
        )  # fmt: skip
    if header(request, "content-encoding") not in (None, "identity"):
        raise ApiError(415, "the body must not be compressed", code="unsupported_media_type")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body. Raises ApiError beyond `limit` bytes, or ClientDisconnect."""
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


def preflight() -> Response:
    """Return the answer to a browser's preflight request from an allowed origin."""
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        },
    )


def refused(request: Request, problem: Exception) -> Response:
    """Return an ApiError in the shape of the API that was called."""
    assert isinstance(problem, ApiError)
    path = request.scope["path"]
    form: type[AnswerFormat] = OllamaFormat if path.startswith("/api/") else AnswerFormat
    return JsonResponse(form.error(problem), problem.status, problem.headers)


def unroutable(request: Request, problem: Exception) -> Response:
    """Return the refusal of an unknown path, or of a method that a route does not take."""
    assert isinstance(problem, HTTPException)
    path = request.scope["path"]
    if problem.status_code == 405:
        message, code = f"{path!r:.100} does not take {request.method}", "method_not_allowed"
    else:
        message, code = f"unknown URL {path!r:.100}", "unknown_url"
    headers = {name.lower(): value for name, value in (problem.headers or {}).items()}
    return refused(request, ApiError(problem.status_code, message, code=code, headers=headers))


def failed(request: Request, problem: Exception) -> Response:
    """Return the error of a bug of ours, without details."""
    return refused(request, internal())
