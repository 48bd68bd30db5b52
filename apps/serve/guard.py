"""Access control: Host and Origin against foreign web pages, a key against everybody else.

A web page can make a browser on this machine call 127.0.0.1. If it does so under a name of its own
that now resolves to 127.0.0.1 (DNS rebinding), the Host header still carries that name; otherwise
the browser sends its Origin. Both are checked against lists. A body that a browser sends without a
preflight (a form, plain text) is not accepted as JSON.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from starlette.requests import Request

from edge.apps.serve.errors import ApiError
from edge.apps.serve.settings import ServerSettings

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


def header(request: Request, name: str) -> str | None:
    """Return a header's value, or None. Raises ApiError 400 when it is given twice."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ApiError(400, f"the header {name} is given twice", code="bad_request")
    return values[0] if values else None


class Guard:
    """Checks made before a request is read. Each raises ApiError."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._key = None if settings.key is None else settings.key.encode()

    def check_head(self, request: Request) -> None:
        """Check the head of a request.

        Raises ApiError 400 for a body with two lengths, 505 for HTTP other than 1.0 and 1.1, 431
        for a head that is too large, 403 unless the Host header names this server, on any port.
        """
        scope, limit = request.scope, self._settings.limits.header_bytes
        if {"content-length", "transfer-encoding"} <= set(request.headers.keys()):
            # RFC 9112, 6.3: a proxy may read such a request as two
            raise ApiError(
                400, "the body has both a content-length and a transfer-encoding",
                code="bad_request", headers={"connection": "close"},
            )  # fmt: skip
        if scope["http_version"] not in ("1.0", "1.1"):
            message = f"HTTP {scope['http_version']} is not supported"
            raise ApiError(505, message, code="bad_request")
        # the parser bounds an incomplete head, but not one that came at once
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in scope["headers"]) > limit:
            raise ApiError(431, f"the head is larger than {limit} bytes", code="head_too_large")
        self._check_host(header(request, "host"))

    def _check_host(self, host: str | None) -> None:
        match = _HOST.fullmatch((host or "").strip().lower())
        name = match[1].strip("[]").removesuffix(".") if match else ""
        if name in self._settings.hosts:
            return
        address = _address(name)
        if address is not None and (address.is_loopback or self._settings.any_address):
            return
        raise ApiError(
            403,
            f"this server does not answer to the host {host!r:.100}; --allow-host adds a name",
            code="host_not_allowed",
        )

    def check_origin(self, request: Request) -> str | None:
        """Return the origin to name in the response. Raises ApiError 403 for an unknown origin.

        None is for requests from no page, or from our own, whose origin is the checked host.
        """
        origin = header(request, "origin")
        if origin is None or origin.lower() in self._settings.origins:
            return origin
        scheme, _, host = origin.lower().partition("://")
        if scheme in ("http", "https") and host == (header(request, "host") or "").lower():
            return None
        raise ApiError(
            403,
            f"pages of {origin!r:.100} may not call this server; --allow-origin adds one",
            code="origin_not_allowed",
        )

    def check_key(self, request: Request) -> None:
        """Raise ApiError 401 unless `Authorization: Bearer KEY` holds the key, in constant time."""
        if self._key is None:
            return
        scheme, _, given = (header(request, "authorization") or "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
        if scheme.lower() != "bearer" or not matches:
            fault = "is wrong" if given else "is missing: send `Authorization: Bearer KEY`"
            raise ApiError(
                401,
                f"the API key {fault}",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
