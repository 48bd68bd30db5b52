"""HTTP connections, with a limit on everything a client could drag out.

uvicorn speaks HTTP through h11 but waits forever for a request whose head or body trickles in, and
for a client that does not read. Here every request must arrive, and everything sent must be read,
in time. Bytes that are not HTTP are refused in the API's own shape.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import ClassVar, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from edge.apps.serve.errors import ApiError, encode
from edge.apps.serve.settings import ServerLimits

HEARD_S = 0.25  # until a request sent on connecting has been read, even from slow clients
KNOWN = "edge.known"  # in the scope of a request that came with the key


class BoundedProtocol(H11Protocol):
    """One connection under `limits`."""

    limits: ClassVar[ServerLimits] = ServerLimits()
    _receiving: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None
    _quiet_since = 0.0  # on the loop's clock: when the client connected, or last sent something

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        super().connection_made(connection)
        # call pause_writing for every byte that waits, not only from 64 KiB on
        connection.set_write_buffer_limits(high=0)
        self._quiet_since = self.loop.time()
        excess = len(self.connections) - self.limits.connections
        if excess > self.limits.connections:
            self._make_room()
        elif excess > 0:
            # many connect in one turn of the loop, and their requests are read in the next
            self.loop.call_later(HEARD_S, self._make_room)
        if not self.transport.is_closing():
            self._set_receive_timer(True)

    def _make_room(self) -> None:
        connections = self._open_connections()
        if len(connections) > self.limits.connections:
            self._connection_to_close(connections)._refuse(
                ApiError(503, "too many connections", code="overloaded",
                         headers={"retry-after": "1"})
            )  # fmt: skip

    def _open_connections(self) -> list[BoundedProtocol]:
        """Return the connections that are not being closed."""
        return [
            peer for peer in self.connections
            if isinstance(peer, BoundedProtocol) and not peer.transport.is_closing()
        ]  # fmt: skip

    def _connection_to_close(self, connections: list[BoundedProtocol]) -> BoundedProtocol:
        """Return the connection to close when there are too many.

        Of the idle connections it is the quietest, with those that never sent the key before all
        others. An address that holds most of the connections makes room among its own. If none is
        idle, it is this one, or that address's last active one.
        """
        address, count = Counter(peer._address for peer in connections).most_common(1)[0]
        if 2 * count > len(connections):
            connections = [peer for peer in connections if peer._address == address]
        others = [peer for peer in connections if peer is not self]
        idle = [peer for peer in others if peer.cycle is None or peer.cycle.response_complete]
        if idle:
            return min(idle, key=lambda peer: (peer._authenticated, peer._quiet_since))
        if self in connections:
            return self
        return max(others, key=lambda peer: peer._quiet_since)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _authenticated(self) -> bool:
        return self.cycle is not None and KNOWN in self.cycle.scope

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_receive_timer(False)
        self._cancel_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None:
            self._quiet_since = self.loop.time()
        self._set_receive_timer(self._incomplete())

    def _incomplete(self) -> bool:
        """Return whether only a part of a request has arrived."""
        if self.transport.is_closing():
            return False
        if self.conn.their_state is h11.IDLE:
            started = bool(self.conn.trailing_data[0])
            if not started and self.timeout_keep_alive_task is None:
                # the rest of a request that was refused early has arrived
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
            return started
        return self.conn.their_state is h11.SEND_BODY

    def _set_receive_timer(self, receiving: bool) -> None:
        if receiving and self._receiving is None:
            self._receiving = self.loop.call_later(self.limits.receive_s, self._on_receive_timeout)
        elif not receiving and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_receive_timeout(self) -> None:
        self._receiving = None
        self._refuse(
            ApiError(
                408,
                f"the request did not arrive within {self.limits.receive_s:g} seconds",
                code="request_timeout",
            )
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self.limits.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_sending()

    def _cancel_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; called by uvicorn while it handles the error."""
        problem = sys.exc_info()[1]
        status = getattr(problem, "error_status_hint", 400)
        self._refuse(ApiError(status, f"not a valid HTTP request: {problem}", code="bad_request"))

    def _refuse(self, problem: ApiError) -> None:
        """Send the error, unless an answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_raw_response(problem))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def bounded(limits: ServerLimits) -> type[BoundedProtocol]:
    """Return a protocol class with these limits; uvicorn takes no instance."""
    return type("Protocol", (BoundedProtocol,), {"limits": limits})


def _raw_response(problem: ApiError) -> bytes:
    body = encode(problem.body())
    phrase = STATUS_PHRASES[problem.status].decode()
    lines = [
        f"HTTP/1.1 {problem.status} {phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in problem.headers.items()),
        "connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body
