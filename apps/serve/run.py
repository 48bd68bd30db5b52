"""The server's process: socket, signals, start line, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from edge.apps.serve.app import App
from edge.apps.serve.protocol import bounded
from edge.apps.serve.settings import ServerSettings
from edge.apps.serve.slot import Slot
from edge.apps.serve.worker import Load, ModelWorker
from edge.errors import InputError
from edge.runtime.engines import title
from edge.runtime.joined import JoinedEngine
from edge.runtime.model import Model

Say = Callable[[dict[str, Any]], None]
SENT_BYTES = 64 << 10
JOIN_S = 5.0  # a run of the engine may be under way; it takes milliseconds, or seconds at most


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises InputError for an unknown address or a port in use."""
    try:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        # asyncio sends small pieces at once (TCP_NODELAY) only if the socket names its protocol
        family, kind, protocol, _, address = addresses[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # inherited by each connection: unread text then waits in this process, which sees it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
            listening.bind(address)
            listening.listen(128)
        except BaseException:
            listening.close()
            raise
    except (OSError, UnicodeError) as problem:
        raise InputError(
            f"cannot listen on {host} port {port}: {getattr(problem, 'strerror', None) or problem}",
            field="--host/--port",
            remedy="choose another; --port 0 takes a free one",
        ) from None
    return listening


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only programs on this machine can reach the socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def url(listening: socket.socket) -> str:
    """Return the URL of the API."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def run(
    settings: ServerSettings,
    listening: socket.socket,
    load: Load,
    say: Say,
    load_other: Callable[[str], tuple[Model, Sequence[Slot]]] | None = None,
) -> int:
    """Serve until a signal; return the exit code. Raises whatever loading the model raised.

    The code is 0 after SIGTERM or SIGHUP, 130 after Ctrl-C. A second signal ends the process at
    once.
    """
    serving = _ServerProcess(settings, load, say, load_other)
    code = asyncio.run(serving.until_told(listening))
    if not serving.worker.join(JOIN_S):
        # loading cannot be interrupted, and leaves nothing to clean up
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if serving.worker.problem is not None:
        raise serving.worker.problem
    return code


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ServerProcess:
    def __init__(
        self,
        settings: ServerSettings,
        load: Load,
        say: Say,
        load_other: Callable[[str], tuple[Model, Sequence[Slot]]] | None,
    ) -> None:
        self._settings = settings
        self._say = say
        self._began = time.monotonic()
        self._code: int | None = None
        self.worker = ModelWorker(load, self._on_loaded, name=settings.name, load_other=load_other)
        limits = settings.limits
        self._server = _Server(
            uvicorn.Config(
                App(settings, self.worker),
                http=bounded(limits),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=limits.header_bytes,
                timeout_keep_alive=limits.idle_s,
                timeout_graceful_shutdown=int(limits.grace_s + JOIN_S),
            )
        )

    async def until_told(self, listening: socket.socket) -> int:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._on_signal, number)
        # malformed requests deserve no warning
        for name in ("uvicorn", "asyncio"):  # nor do clients that leave during an answer
            logging.getLogger(name).setLevel(logging.ERROR)
        self.worker.start()
        await self._server.serve(sockets=[listening])
        self.worker.stop()
        return self._code or 0

    def _on_signal(self, number: int) -> None:
        if self._code is not None:
            os._exit(128 + number)
        self._code = 128 + number if number == signal.SIGINT else 0
        self.worker.drain()
        self._server.should_exit = True
        self._loop.call_later(self._settings.limits.grace_s, self.worker.stop)
        self._report({"event": "stopping", "signal": signal.Signals(number).name})

    def _on_loaded(self) -> None:
        """Called in the worker's thread: the model is loaded, or has failed to load."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._report_loaded)

    def _report_loaded(self) -> None:
        if self.worker.problem is not None:
            self._server.should_exit = True
        elif self._code is None:
            load_s, served = round(time.monotonic() - self._began, 3), self.worker.served
            assert served is not None
            engine = served.model.engine
            several = isinstance(engine, JoinedEngine)
            engine = engine.engine if isinstance(engine, JoinedEngine) else engine
            event = {"event": "ready", "load_s": load_s, "engine": title(engine)}
            joins = several and engine.most_joined > 1
            self._report(event | {"parallel": self.worker.parallel, "joined": joins})

    def _report(self, event: dict[str, Any]) -> None:
        """Report an event, unless the terminal or pipe has been closed."""
        with contextlib.suppress(OSError):
            self._say(event)
