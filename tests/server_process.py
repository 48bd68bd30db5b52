"""A real `edge serve` process on a free loopback port, and raw sockets to it."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from typing import IO, Any

import openai

from tests.forks import ROOT, Fork

KEY = "the-key-of-the-tests"
PATIENCE = 60  # seconds for anything on a busy machine; nothing takes that long
END = "6"  # the demo model's end of turn
ENDLESS: dict[str, Any] = {"max_tokens": 1_000_000, "logit_bias": {END: -100}}
HELLO: list[Any] = [{"role": "user", "content": "Hello, how are you?"}]


class Server:
    """`edge serve` with `--json`. On exit it is stopped; it must have logged no failure."""

    def __init__(
        self, *options: str, bundle: str = "demo", key: str | None = KEY, anew: bool = False
    ) -> None:
        """`anew`: start Python, instead of forking a process that has imported the programs."""
        environment = {name: value for name, value in os.environ.items() if name != "EDGE_API_KEY"}
        if key is not None:
            environment["EDGE_API_KEY"] = key
        start = _started if anew else _forked
        command = ["serve", bundle, "--port", "0", "--json", "--threads", "1", *options]
        self.process, out, err = start(command, environment)
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        for stream, take in (
            (out, self._lines.put),
            (err, self._errors.append),
        ):
            threading.Thread(target=_pump, args=(stream, take), daemon=True).start()
        self.key = key or ""
        self.start: dict[str, Any] = {}

    def __enter__(self) -> Server:
        self.start = self.said("listening")
        self.key = self.start["api_key"] or self.key
        self.said("ready")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            assert self.left() is not None
        finally:
            self.process.kill()
        assert "Traceback" not in self.stderr, self.stderr

    def said(self, event: str) -> dict[str, Any]:
        """Return the next line on standard output, which must be this event."""
        fact: dict[str, Any] = json.loads(self._lines.get(timeout=PATIENCE))
        assert fact["event"] == event, fact
        return fact

    def left(self) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(PATIENCE)

    @property
    def stderr(self) -> str:
        return "".join(self._errors)

    @property
    def port(self) -> int:
        return int(self.start["url"].rpartition(":")[2].partition("/")[0])

    def client(self, **options: Any) -> openai.OpenAI:
        """Return the official client, without retries."""
        given = {"api_key": self.key, "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=self.start["url"], **given)

    def connect(self) -> socket.socket:
        """Open a bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def raw(self, data: bytes) -> tuple[int, dict[str, str], Any]:
        """Send bytes, read until the server closes; return status, headers, and body as JSON or
        bytes.
        """
        with self.connect() as connection:
            connection.sendall(data)
            return parsed(received(connection))

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str | None] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send one request over its own connection. A header of None is left out."""
        data = body if isinstance(body, bytes) else b"" if body is None else _json(body)
        fields: dict[str, str | None] = {
            "host": f"127.0.0.1:{self.port}",
            "authorization": f"Bearer {self.key}",
            "content-type": "application/json",
            "content-length": str(len(data)),
            "connection": "close",
        } | (headers or {})
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in fields.items() if value is not None]
        return self.raw("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


def _forked(command: list[str], environment: dict[str, str]) -> tuple[Any, IO[str], IO[str]]:
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    with open(os.devnull) as nothing, open(out_end, "w") as one, open(err_end, "w") as other:
        files = nothing.fileno(), one.fileno(), other.fileno()
        process = Fork("edge.apps.cli", *command, files=files, environment=environment)
    return process, open(out), open(err)


def _started(command: list[str], environment: dict[str, str]) -> tuple[Any, IO[str], IO[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "edge.apps.cli", *command], text=True, cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    return process, process.stdout, process.stderr


def received(connection: socket.socket) -> bytes:
    """Return everything until the server closes or resets."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def parsed(data: bytes) -> tuple[int, dict[str, str], Any]:
    """Parse a whole response."""
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    if "content-length" in fields:
        body = body[: int(fields["content-length"])]
    if fields.get("content-type") == "application/json" and body:
        return int(status.split()[1]), fields, json.loads(body)
    return int(status.split()[1]), fields, body


def is_error(body: Any) -> bool:
    """Check that a body has the shape of the API's errors."""
    return (
        set(body) == {"error"}
        and set(body["error"]) == {"message", "type", "param", "code"}
        and bool(body["error"]["message"])
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _pump(stream: Any, take: Any) -> None:
    with stream:
        for line in stream:
            take(line)
