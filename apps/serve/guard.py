"""Who may call: Host and Origin against pages of strangers, a key against everybody else.

A page from the web can make a browser on this machine call 127.0.0.1. If it does so under a name
of its own that now resolves to 127.0.0.1 (DNS rebinding), the Host header still carries that name;
otherwise the browser sends its Origin. Both are compared with lists, and a request whose body
could be sent without asking us first (a form, plain text) is not taken for JSON.
"""

from __future__ import annotations

import hmac
import ipaddress
import re

from edge.apps.serve.errors import ApiError
from edge.apps.serve.settings import Settings

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


class Guard:
    """The checks that come before a request is looked at. Each raises ApiError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._key = None if settings.key is None else settings.key.encode()

    def check_host(self, host: str | None) -> None:
        """403 unless the Host header names this server, whatever its port."""
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

    def check_origin(self, origin: str | None) -> str | None:
        """The origin to name in the response: None for a request that no page made, else 403."""
        if origin is None:
            return None
        if origin.lower() in self._settings.origins:
            return origin
        raise ApiError(
            403,
            f"pages of {origin!r:.100} may not call this server; --allow-origin adds one",
            code="origin_not_allowed",
        )

    def check_key(self, authorization: str | None) -> None:
        """401 unless `Authorization: Bearer KEY` holds the key; time tells nothing of it."""
        if self._key is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
        if scheme.lower() != "bearer" or not right:
            said = "is wrong" if given else "is missing: send `Authorization: Bearer KEY`"
            raise ApiError(
                401,
                f"the API key {said}",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
