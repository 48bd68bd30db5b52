"""Download files over HTTP: resume partial ones, verify complete ones."""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edge.apps.terminal import console, say
from edge.apps.units import megabytes
from edge.errors import PullError

BLOCK = 1 << 20
TIMEOUT = 30.0
TRIES = 5
PAUSE = 1.0  # seconds before the second try, then twice as long each time
PART = ".part"
_BROKEN = (urllib.error.URLError, ConnectionError, TimeoutError, ssl.SSLError, HTTPException)


@dataclass(frozen=True)
class RemoteFile:
    """A file to fetch.

    Attributes:
        name: target path relative to the folder, never outside it.
        url: address of the file.
        size: size in bytes.
        sha256: SHA-256 of the content, in hex, or None.
        git_id: git blob id of the content, in hex, or None.
    """

    name: str
    url: str
    size: int
    sha256: str | None = None
    git_id: str | None = None


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follow HTTP redirects, without leaking credentials or reaching this machine.

    The Authorization header is dropped for another host and for plain HTTP. A redirect from a
    remote host to this machine is refused.
    """

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https"):
            raise urllib.error.URLError(f"it redirects to {newurl!r:.100}, which is not HTTP")
        if _is_here(new.hostname) and not _is_here(old.hostname):
            raise urllib.error.URLError(f"it redirects to this machine: {newurl!r:.100}")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        opened = old.scheme == "https" != new.scheme
        if following is not None and (opened or new.netloc != old.netloc):
            following.remove_header("Authorization")
        return following


def _is_here(host: str | None) -> bool:
    """Return whether a host name resolves to a loopback, link-local or unspecified address."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)} if host else set()
        places = [ipaddress.ip_address(str(each).partition("%")[0]) for each in found]
    except (OSError, ValueError):
        return False  # connecting to it will fail as well
    plain = [getattr(each, "ipv4_mapped", None) or each for each in places]
    return any(each.is_loopback or each.is_link_local or each.is_unspecified for each in plain)


def _opened(url: str, headers: Mapping[str, str]) -> Any:
    """Open a URL, following redirects. Raises one of _BROKEN, which includes HTTPError."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        return urllib.request.build_opener(Redirects).open(request, timeout=TIMEOUT)
    except ValueError as problem:  # a redirect to an invalid URL
        raise urllib.error.URLError(problem) from None


def ask(url: str, headers: Mapping[str, str], most: int) -> bytes:
    """Return the body of a response of at most `most` bytes.

    Raises OSError (urllib's HTTPError included) or HTTPException when there is no connection, the
    server refuses, or the body is larger.
    """
    with _opened(url, headers) as answer:
        told = b""
        while len(told) <= most and (block := answer.read1(BLOCK)):
            told += block
    if len(told) > most:
        raise ConnectionError(f"its answer is larger than {megabytes(most)}")
    return told


def fetch(files: list[RemoteFile], folder: Path, headers: Mapping[str, str]) -> None:
    """Download the files that are missing, with a progress bar where stderr is a terminal.

    Raises PullError when the disk is full, the connection fails TRIES times, the server refuses,
    or the content is not what was announced. Completed parts stay and are not fetched again.
    """
    there = {file.name: _part_size(folder, file) for file in files}
    total, done = sum(file.size for file in files), sum(there.values())
    check_room(folder, total - done)
    if done < total:
        say(f"{len(files)} files, {megabytes(total)}", end="", file=sys.stderr)
        say(f", {megabytes(done)} already downloaded" if done else "", file=sys.stderr)
    with _bar(total, done) as advance:
        for file in files:
            with _disk(folder):
                _fetch(file, folder, headers, advance)


def check_room(folder: Path, needed: int) -> None:
    """Raise PullError unless `needed` bytes fit on the folder's disk. It need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise PullError(
            f"needs {megabytes(needed)}, {megabytes(free)} are free", file=folder,
            remedy="free space with edge list and edge rm, or set EDGE_MODELS to another folder",
        )  # fmt: skip


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a download. Raises PullError when another process holds it."""
    with _disk(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PullError(
                    "is being pulled by another process", file=what, remedy="wait for it to end"
                ) from None
        yield
    finally:
        os.close(fd)


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise PullError(
            f"cannot be written: {problem.strerror or problem}", file=folder,
            remedy="free some disk space; the same command then resumes",
        ) from None  # fmt: skip


@contextmanager
def _bar(total: int, done: int) -> Iterator[Any]:
    """Show a progress bar; yield a function that advances it by a number of bytes."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bars = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(),
        console=bars, transient=True, disable=not bars.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("fetching", total=total, completed=done)
        yield lambda count: bar.advance(task, count)


def _part_size(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file are already downloaded."""
    for path in (folder / file.name, folder / (file.name + PART)):
        with suppress(OSError):
            return min(path.stat().st_size, file.size)
    return 0


def _fetch(file: RemoteFile, folder: Path, headers: Mapping[str, str], advance: Any) -> None:
    whole = folder / file.name
    if whole.is_file():
        return
    part = folder / (file.name + PART)
    part.parent.mkdir(parents=True, exist_ok=True)
    resumed = part.exists()
    _try(file, part, headers, advance)
    try:
        _check(file, part)
    except PullError:
        if not resumed:
            raise
        advance(-file.size)  # the earlier part may belong to different content
        _try(file, part, headers, advance)
        _check(file, part)
    os.replace(part, whole)


def _try(file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Any) -> None:
    """Fetch the rest of a file, retrying when the connection breaks."""
    for attempt in range(TRIES):
        try:
            _continue(file, part, headers, advance)
            return
        except urllib.error.HTTPError as problem:
            if problem.code != 416 or attempt:
                raise _refused(file, problem) from None
            advance(-min(part.stat().st_size, file.size))
            part.unlink()  # the server's file is shorter than the part
        except _BROKEN as problem:
            if attempt == TRIES - 1:
                raise PullError(
                    f"the connection failed: {problem!s:.200}", file=file.url.partition("?")[0],
                    remedy="run the same command again to resume",
                ) from None  # fmt: skip
            time.sleep(PAUSE * 2**attempt)


def _continue(file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Any) -> None:
    """Fetch the rest of a file. Raises ConnectionError when the response ends too early."""
    with part.open("ab") as out:
        have = out.tell()
        known = file.sha256 or file.git_id  # without a hash, parts of two versions could mix
        if have > file.size or (have < file.size and not known):
            advance(-min(have, file.size))
            out.truncate(0)
            have = 0
        if have == file.size:
            return
        ranged = {"Range": f"bytes={have}-"} if have else {}
        with _opened(file.url, {**headers, **ranged}) as answer:
            said = answer.headers.get("Content-Range") or f"bytes {have}-"
            if answer.status == 206 and not said.startswith(f"bytes {have}-"):
                raise ConnectionError(f"it sent a different range: {said:.60}")
            if have and answer.status != 206:  # the server sends the whole file again
                advance(-have)
                out.truncate(0)
                have = 0
            while have < file.size and (block := answer.read1(min(BLOCK, file.size - have))):
                out.write(block)
                have += len(block)
                advance(len(block))
    if have < file.size:
        raise ConnectionError(f"it ended after {have} of {file.size} bytes")


def _check(file: RemoteFile, part: Path) -> None:
    """Remove the file and raise PullError unless its content is what was announced."""
    size = part.stat().st_size
    sha256 = hashlib.sha256()
    git = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with part.open("rb") as content:
        while block := content.read(BLOCK):
            sha256.update(block)
            git.update(block)
    right = size == file.size
    if file.sha256 is not None:
        right = right and sha256.hexdigest() == file.sha256
    elif file.git_id is not None:
        right = right and git.hexdigest() == file.git_id
    if not right:
        part.unlink()
        raise PullError(
            "is not what was announced; it was altered or damaged in transit",
            file=file.name, remedy="try again",
        )  # fmt: skip


def _refused(file: RemoteFile, problem: urllib.error.HTTPError) -> PullError:
    remedy = "try again later"
    if problem.code in (401, 403):
        remedy = "accept the model's terms on its page, and set HF_TOKEN to your access token"
    return PullError(
        f"the server answered {problem.code} {problem.reason!s:.100}", file=file.name, remedy=remedy
    )
