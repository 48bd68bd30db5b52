"""`edge pull` from a hostile server: typed errors, bounded memory, nothing written outside."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from edge.apps.models import download
from edge.apps.models.download import RemoteFile, fetch
from edge.bundle import store
from edge.errors import PullError
from tests.hub_server import COMMIT, FakeHub
from tests.test_models_pull import QUICK, REPOSITORY, call, checkpoint, hub, refused

__all__ = ["checkpoint", "hub"]  # fixtures
Answer = Callable[[BaseHTTPRequestHandler], None]
WEIGHTS = "model.safetensors"


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    def send(to: BaseHTTPRequestHandler) -> None:
        to.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            to.send_header(name.replace("_", "-"), value)
        to.end_headers()
        to.wfile.write(body)
        to.close_connection = True

    return send


def raw(data: bytes) -> Answer:
    def send(to: BaseHTTPRequestHandler) -> None:
        to.wfile.write(data)
        to.close_connection = True

    return send


def endless(status: bytes, block: bytes, most: int = 4 << 30) -> Answer:
    """A body that ends when nobody reads it, or once it is larger than anyone should accept."""

    def send(to: BaseHTTPRequestHandler) -> None:
        to.close_connection = True
        try:
            to.wfile.write(status)
            for _ in range(most // len(block)):
                to.wfile.write(block)
        except OSError:
            pass

    return send


REDIRECTS = (
    "file:///etc/passwd", "ftp://127.0.0.1:1/x", "gopher://127.0.0.1/x", "data:text/plain,x",
    "http://[::1", "http://[v1.x]/", "http://127.0.0.1:99999/x", "http://127.0.0.1:x/y",
    "http://" + "a" * 70 + ".example/", "http://.example/", "http:///x", "http://a b/", "//", "",
    "http://xn--\u00e9/", "/" + "x" * 60_000,
)  # fmt: skip


@pytest.mark.parametrize("location", REDIRECTS, ids=lambda where: where[:30])
def test_redirects_lead_to_files_over_http(location: str, hub: FakeHub) -> None:
    hub.instead[WEIGHTS] = answer(302, Location=location)
    problem = refused("pull", REPOSITORY, *QUICK)
    assert len(str(problem)) < 1000 and store.names() == []
    hub.instead = {"Tiny-Llama": answer(302, Location=location)}
    assert len(str(refused("pull", REPOSITORY, *QUICK))) < 1000


def test_other_machines_lead_nobody_to_this_one() -> None:
    """Services on loopback, or with a cloud's secrets, trust whoever can reach them."""
    following = download.Redirects().redirect_request
    for there in ("127.0.0.1", "localhost:80", "[::1]:11434", "169.254.169.254", "0.0.0.0",
                  "127.1", "2130706433", "[::ffff:127.0.0.1]"):  # fmt: skip
        far = urllib.request.Request("http://hub.example/x")
        with pytest.raises(urllib.error.URLError, match="this machine"):
            following(far, None, 302, "", {}, f"http://{there}/x")
        near = urllib.request.Request("http://127.0.0.1:8000/x")
        assert following(near, None, 302, "", {}, f"http://{there}/x") is not None


ODD = {
    "no such version": b"HTTP/9.9 200 OK\r\n\r\n",
    "no HTTP": b"\0" * 100_000,
    "a long line": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nx",
    "a length in words": b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\nx",
    "a chunk of no number": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk too large": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"f" * 40 + b"\r\nxx",
    "nothing": b"",
    "teapot": b"HTTP/1.1 418 " + b"\x1b]52;c;x\x07" * 4000 + b"\r\nContent-Length: 0\r\n\r\n",
    "less than it says": b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\nxx",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "another part": b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 7-8/9\r\n"
    b"Content-Length: 2\r\n\r\nxx",
}  # fmt: skip


@pytest.mark.parametrize("how", ODD)
def test_odd_answers(how: str, hub: FakeHub) -> None:
    for name in (WEIGHTS, "Tiny-Llama", "config.json"):
        shutil.rmtree(store.folder(), ignore_errors=True)
        hub.instead = {name: raw(ODD[how])}
        problem = refused("pull", REPOSITORY, *QUICK)
        assert len(str(problem)) < 1000, name
    hub.instead = {}
    assert call("pull", REPOSITORY, *QUICK).exit_code == 0  # nothing remains that interferes


PULLED = """
import sys
import edge.apps.models.pull as pull
from edge.apps.measure.memory import resident
from edge.errors import PullError
before = resident().peak  # getrusage would tell the peak of the process that started this one
for repository in sys.argv[1:]:
    try:
        pull.hub.look_up(repository, None)
    except PullError as problem:
        print((resident().peak - before) >> 20, " ".join(str(problem).split()))
"""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def packed(to: BaseHTTPRequestHandler) -> None:
    """256 MiB in one."""
    body = gzip.compress(b" " * (1 << 28), 1)
    answer(200, body, Content_Encoding="gzip", Content_Type="application/json")(to)


TELLINGS: dict[str, Answer] = {
    "endless": endless(HEAD + b"\r\n", b" " * (1 << 20), 2 << 30),
    "endless chunks": endless(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b" " * (1 << 20) + b"\r\n",
        2 << 30,
    ),
    "packed": packed,
    "nested": answer(200, b"[" * 1_000_000),
    "a list": answer(200, b"[]"),
    "a number of digits": answer(200, b'{"downloads": ' + b"9" * 100_000 + b"}"),
}  # fmt: skip


def test_what_a_hub_tells_is_bounded(hub: FakeHub) -> None:
    """One process is told everything: memory is its peak, and so that of the worst."""
    hub.instead = {how.replace(" ", "-"): tells for how, tells in TELLINGS.items()}
    command = [sys.executable, "-c", PULLED, *(f"someone/{name}" for name in hub.instead)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    told = done.stdout.splitlines()
    assert len(told) == len(TELLINGS), told
    for line in told:
        megabytes, _, problem = line.partition(" ")
        assert problem and int(megabytes) < 200, line


def test_a_manifest_is_small_before_it_is_fetched(hub: FakeHub) -> None:
    files = [{"rfilename": "manifest.json", "size": 3 << 20}]
    hub.told = {"siblings": files}
    assert "manifest.json of" in refused("pull", REPOSITORY, *QUICK).message
    assert hub.asked == []


def part_of(hub: FakeHub, folder: Path, content: bytes, hashed: bool) -> RemoteFile:
    """Return a file whose first four bytes exist already, from another version."""
    folder.mkdir(exist_ok=True)
    hub.files[REPOSITORY]["x.txt"] = content
    (folder / "x.txt.part").write_bytes(b"zzzz")
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() if hashed else None
    url = f"{hub.url}/{REPOSITORY}/resolve/{COMMIT}/x.txt"
    return RemoteFile("x.txt", url, len(content), git_id=git)


def test_parts_of_two_versions_are_not_joined(hub: FakeHub, tmp_path: Path) -> None:
    file = part_of(hub, tmp_path / "a", b"0123456789", hashed=False)
    fetch([file], tmp_path / "a", {})
    assert (tmp_path / "a/x.txt").read_bytes() == b"0123456789"
    file = part_of(hub, tmp_path / "b", b"0123456789", hashed=True)
    fetch([file], tmp_path / "b", {})
    assert hub.served("x.txt") == [None, "bytes=4-", None]
    assert (tmp_path / "b/x.txt").read_bytes() == b"0123456789"


@pytest.mark.parametrize("lie", ["bytes 0-9/10", "bytes 5-9/10", "x", "bytes 40-/10"])
def test_a_part_is_the_one_that_was_asked_for(lie: str, hub: FakeHub, tmp_path: Path) -> None:
    file = part_of(hub, tmp_path, b"0123456789", hashed=True)
    hub.instead["x.txt"] = answer(206, b"456789", Content_Range=lie)
    with pytest.raises(PullError, match="a different range"):
        fetch([file], tmp_path, {})


def test_a_part_that_the_server_has_not_is_fetched_anew(hub: FakeHub, tmp_path: Path) -> None:
    file = part_of(hub, tmp_path, b"0123456789", hashed=True)

    def once(to: BaseHTTPRequestHandler) -> None:
        del hub.instead["x.txt"]
        answer(416)(to)

    hub.instead["x.txt"] = once
    fetch([file], tmp_path, {})
    assert (tmp_path / "x.txt").read_bytes() == b"0123456789"
    hub.instead["y.txt"] = answer(416)
    with pytest.raises(PullError, match="answered 416"):
        fetch([replace(file, name="y.txt", url=file.url[:-5] + "y.txt")], tmp_path, {})


def test_downloads_lie_in_a_folder_of_ones_own(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others who may write to the models folder could place links there beforehand."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / f"{WEIGHTS}.part").write_bytes(b"precious" * 1000)
    place = store.folder() / store.DOWNLOADS
    place.mkdir(parents=True)
    planted = place / f"{REPOSITORY.replace('/', '-')}@{COMMIT}"
    planted.symlink_to(mine)
    assert "not a folder of yours" in refused("pull", REPOSITORY, *QUICK).message
    assert (mine / f"{WEIGHTS}.part").read_bytes() == b"precious" * 1000
    planted.unlink()
    planted.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: planted.stat().st_uid + 1)
    assert "not a folder of yours" in refused("pull", REPOSITORY, *QUICK).message
    planted.rmdir()
    monkeypatch.undo()
