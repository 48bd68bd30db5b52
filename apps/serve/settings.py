"""Settings of a server: who may call, and how much one client may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True)
class ServerLimits:
    """Limits on one request, or one client.

    Attributes:
        body_bytes: maximum bytes of a request's body; header_bytes: of its head.
        receive_s: seconds for a whole request to arrive, from the connection or its first byte on.
        send_s: seconds that sent bytes may wait for a client to read them.
        idle_s: seconds a connection may stay open between requests.
        connections: maximum number of open connections.
        waiting: maximum number of requests that wait while others are answered.
        deadline_s: seconds a request may take from its arrival, waiting included.
        prompt_tokens: maximum tokens of a prompt.
        grace_s: seconds running answers get to finish when the server is told to stop.
        cache_bytes: memory for states to reuse; 0 reuses nothing.
    """

    body_bytes: int = MIB
    header_bytes: int = 16 << 10
    receive_s: float = 10.0
    send_s: float = 30.0
    idle_s: int = 15
    connections: int = 256
    waiting: int = 16
    deadline_s: float = 600.0
    prompt_tokens: int = 32_768
    grace_s: float = 10.0
    cache_bytes: int = 128 * MIB


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        name: name of the model in requests. folder: its bundle.
        key: key that clients must send; None if none is required.
        hosts: names in the Host header that are ours; any_address: accept IP addresses too.
        origins: web origins whose pages may call.
        pulled: whether pulled models are served too, loaded when requested.
        log: whether a line is written for each request.
    """

    name: str
    folder: Path
    key: str | None
    hosts: frozenset[str]
    any_address: bool = False
    origins: frozenset[str] = frozenset()
    pulled: bool = False
    log: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)
