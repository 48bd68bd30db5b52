"""A server that speaks the hub's API over files in memory, and misbehaves on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin")  # stored in LFS, and served from another host


@dataclass
class FakeHub:
    """The hub's content, its faults, and the requests that it received.

    Attributes:
        files: repository → name → content.
        cut: name of a file → bytes after which the response ends, once for each entry.
        gate: name of a file → event to wait for before the last half of it.
        altered: names of files that are served with different content.
        token: token without which repositories appear not to exist.
        told: fields of a repository's description to override.
        instead: last part of a path → handler that answers requests for it.
        asked: (path, Range header, Authorization header, host) of every request for content.
    """

    files: dict[str, dict[str, bytes]]
    cut: dict[str, list[int]] = field(default_factory=dict)
    gate: dict[str, threading.Event] = field(default_factory=dict)
    altered: set[str] = field(default_factory=set)
    ranges: bool = True
    token: str | None = None
    licence: str | None = "apache-2.0"
    gated: bool = False
    told: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    asked: list[tuple[str, str | None, str | None, str]] = field(default_factory=list)
    url: str = ""

    def add(self, repository: str, folder: Path) -> None:
        self.files[repository] = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def served(self, name: str) -> list[str | None]:
        """Return the Range headers of the requests for a file's content."""
        return [range_ for path, range_, _, _ in self.asked if path.endswith(f"/{name}")]


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(_Handler):
        fake = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        for gate in hub.gate.values():
            gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        elsewhere = re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path)
        if (instead := self.fake.instead.get(path.rpartition("/")[2])) is not None:
            instead(self)
        elif api is not None:
            self._tell(*api.groups())
        elif file is not None and file[1] in self.fake.files:
            repository, revision, name = file.groups()
            assert revision == COMMIT, "asked for by the commit that was told"
            if name.endswith(LARGE):
                self._redirect(f"/cdn/{repository}/{name}?signature=x")
            else:
                self._send(path, name, self.fake.files[repository][name])
        elif elsewhere is not None:
            self._send(path, elsewhere[2], self.fake.files[elsewhere[1]][elsewhere[2]])
        else:
            self._refuse(404, "EntryNotFound")

    def _tell(self, repository: str, revision: str | None) -> None:
        hub = self.fake
        allowed = hub.token is None or self.headers["Authorization"] == f"Bearer {hub.token}"
        if hub.gated:
            return self._refuse(403, "GatedRepo")
        if repository not in hub.files or not allowed:
            return self._refuse(401, "RepoNotFound")
        if revision not in (None, "main", COMMIT, COMMIT[:7]):
            return self._refuse(404, "RevisionNotFound")
        siblings: list[dict[str, Any]] = []
        for name, content in hub.files[repository].items():
            git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            told: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git}
            if name.endswith(LARGE):
                sha256 = hashlib.sha256(content).hexdigest()
                told["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(told)
        card = {} if hub.licence is None else {"license": hub.licence}
        answer = {"_id": "1", "id": repository, "modelId": repository, "sha": COMMIT,
                  "private": False, "tags": [], "downloads": 0, "likes": 0,
                  "cardData": card, "siblings": siblings} | hub.told  # fmt: skip
        return self._answer(200, json.dumps(answer).encode())

    def _redirect(self, path: str) -> None:
        # another name of this machine, so that it counts as another host
        port = urlsplit(self.fake.url).port
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{port}{path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, path: str, name: str, content: bytes) -> None:
        hub, asked = self.fake, self.headers["Range"]
        hub.asked.append((path, asked, self.headers["Authorization"], self.headers["Host"]))
        if name in hub.altered:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and hub.ranges else 0
        body = content[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if cuts := hub.cut.get(name):
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        if (gate := hub.gate.get(name)) is not None:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            gate.wait(60)
            body = body[len(body) // 2 :]
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
