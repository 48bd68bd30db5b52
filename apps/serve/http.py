"""One request and its response, over ASGI."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from edge.apps.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gone(Exception):
    """The client closed the connection before its request was whole."""


class Call:
    """Attributes:
    method, path: of the request.
    started: whether a response has begun.
    extra: headers that every response to this request carries.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.started = False
        self.extra: dict[str, str] = {}
        self._version: str = scope["http_version"]
        self._target = len(scope["raw_path"]) + len(scope["query_string"])
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send

    def check_head(self, limit: int) -> None:
        """Refuse another HTTP than 1.0 and 1.1, and a head of more than `limit` bytes."""
        if self._version not in ("1.0", "1.1"):
            raise ApiError(505, f"HTTP {self._version} is not spoken here", code="bad_request")
        # the parser bounds a head that is incomplete, and not one that came at once
        size = self._target + sum(len(name) + len(value) for name, value in self._headers)
        if size > limit:
            raise ApiError(431, f"the head is larger than {limit} bytes", code="head_too_large")

    def header(self, name: str) -> str | None:
        """A header's value, None when it is absent. 400 when it is given twice."""
        wanted = name.encode()
        found = [value for key, value in self._headers if key == wanted]
        if len(found) > 1:
            raise ApiError(400, f"the header {name} is given twice", code="bad_request")
        return found[0].decode("latin-1") if found else None

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises ApiError beyond `limit` bytes, Gone when it does not come."""
        declared = self.header("content-length")
        if declared is not None and int(declared) > limit:  # h11 has checked that it is a number
            raise _too_large(limit)
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def gone(self) -> None:
        """Return when the client has closed the connection; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self, status: int, payload: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole response: JSON, or with None nothing."""
        data = b"" if payload is None else encode(payload)
        fields = {"content-length": str(len(data)), **(headers or {})}
        if payload is not None:
            fields["content-type"] = "application/json"
        await self._start(status, fields)
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, problem: ApiError) -> None:
        """An error, in the stream when that has begun."""
        if self.started:
            await self.event(problem.body())
            await self.end()
        else:
            await self.respond(problem.status, problem.body(), problem.headers)

    async def event(self, payload: Any) -> None:
        """One server-sent event; the first one begins the response."""
        if not self.started:
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    # a buffering proxy would keep the text back
                    "x-accel-buffering": "no",
                },
            )
        data = payload.encode() if isinstance(payload, str) else encode(payload)
        await self._send(
            {"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}
        )

    async def end(self) -> None:
        """End a stream of events."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, fields: Mapping[str, str]) -> None:
        self.started = True
        pairs = {
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
            **self.extra,
            **fields,
        }
        headers = [(key.encode(), value.encode("latin-1")) for key, value in pairs.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def encode(payload: Any) -> bytes:
    """JSON on one line. Lone surrogates, which errors may quote from a request, become `?`."""
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
