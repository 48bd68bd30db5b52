"""Files over HTTP: resumed where they were cut off, checked when they are whole."""

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

from edge.apps.terminal import say
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
        name: where it goes, relative to the folder; no part of it leads out.
        url: where it is.
        size: in bytes.
        sha256: of its content, in hex, or None.
        git_id: git's id of its content, in hex, or None.
    """

    name: str
    url: str
    size: int
    sha256: str | None = None
    git_id: str | None = None


class _OtherHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP, but tells the secrets of one host to no other, nor in plain
    text, and lets no other machine lead to this one.
    """

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https"):
            raise urllib.error.URLError(f"it leads to {newurl!r:.100}, which is not HTTP")
        if _is_here(new.hostname) and not _is_here(old.hostname):
            raise urllib.error.URLError(f"it leads to this machine: {newurl!r:.100}")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        opened = old.scheme == "https" != new.scheme
        if following is not None and (opened or new.netloc != old.netloc):
            following.remove_header("Authorization")
        return following


def _is_here(host: str | None) -> bool:
    """Whether a name is this machine's, or one that only its neighbours see."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)} if host else set()
        places = [ipaddress.ip_address(str(each).partition("%")[0]) for each in found]
    except (OSError, ValueError):
        return False  # nobody will connect to it either
    plain = [getattr(each, "ipv4_mapped", None) or each for each in places]
    return any(each.is_loopback or each.is_link_local or each.is_unspecified for each in plain)


def _opened(url: str, headers: Mapping[str, str]) -> Any:
    """An answer, behind redirects. Raises one of _BROKEN, HTTPError among them."""
    try:
        request = urllib.request.Request(url, headers=dict(headers))
        return urllib.request.build_opener(_OtherHost).open(request, timeout=TIMEOUT)
    except ValueError as problem:  # of a redirect that is not a place
        raise urllib.error.URLError(problem) from None


def ask(url: str, headers: Mapping[str, str], most: int) -> bytes:
    """What a server tells. Raises OSError or HTTPException, urllib's HTTPError among them: no
    connection, refused, or more than `most` bytes.
    """
    with _opened(url, headers) as answer:
        told = b""
        while len(told) <= most and (block := answer.read1(BLOCK)):
            told += block
    if len(told) > most:
        raise ConnectionError(f"it tells more than {megabytes(most)}")
    return told


def fetch(files: list[RemoteFile], folder: Path, headers: Mapping[str, str]) -> None:
    """Fetch what is not there yet; a bar on standard error where somebody can see it.

    Raises PullError: no room on the disk, no connection after TRIES tries, refused by the server,
    or of another content than was announced. What was fetched stays, and is not fetched again.
    """
    there = {file.name: _part_size(folder, file) for file in files}
    total, done = sum(file.size for file in files), sum(there.values())
    check_room(folder, total - done)
    if done < total:
        say(f"{len(files)} files, {megabytes(total)}", end="", file=sys.stderr)
        say(f", of which {megabytes(done)} are here" if done else "", file=sys.stderr)
    with _bar(total, done) as advance:
        for file in files:
            with _disk(folder):
                _fetch(file, folder, headers, advance)


def check_room(folder: Path, needed: int) -> None:
    """Raises PullError unless `needed` bytes fit beside the folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise PullError(
            f"needs {megabytes(needed)}, {megabytes(free)} are free", file=folder,
            remedy="make room (edge list, edge rm), or name another folder by EDGE_MODELS",
        )  # fmt: skip


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Keep other processes from fetching the same. Raises PullError when one does."""
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
            remedy="make room on the disk; the same command then resumes",
        ) from None  # fmt: skip


@contextmanager
def _bar(total: int, done: int) -> Iterator[Any]:
    """Yields a function that takes how many more bytes have come."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("fetching", total=total, completed=done)
        yield lambda count: bar.advance(task, count)


def _part_size(folder: Path, file: RemoteFile) -> int:
    """Bytes of a file that are there."""
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
        advance(-file.size)  # what was there may have been of something else
        _try(file, part, headers, advance)
        _check(file, part)
    os.replace(part, whole)


def _try(file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Any) -> None:
    """Fetch what is missing of a file, several times where the connection breaks."""
    for attempt in range(TRIES):
        try:
            _continue(file, part, headers, advance)
            return
        except urllib.error.HTTPError as problem:
            if problem.code != 416 or attempt:
                raise _refused(file, problem) from None
            part.unlink()  # the server has less of it than is here
        except _BROKEN as problem:
            if attempt == TRIES - 1:
                raise PullError(
                    f"the connection failed: {problem!s:.200}", file=file.url.partition("?")[0],
                    remedy="the same command resumes where it ended",
                ) from None  # fmt: skip
            time.sleep(PAUSE * 2**attempt)


def _continue(file: RemoteFile, part: Path, headers: Mapping[str, str], advance: Any) -> None:
    """Fetch what is missing of a file. Raises ConnectionError where less comes than should."""
    with part.open("ab") as out:
        have = out.tell()
        known = file.sha256 or file.git_id  # else parts of two versions would not be told apart
        if have > file.size or (have < file.size and not known):
            out.truncate(0)
            have = 0
        if have == file.size:
            return
        ranged = {"Range": f"bytes={have}-"} if have else {}
        with _opened(file.url, {**headers, **ranged}) as answer:
            said = answer.headers.get("Content-Range") or f"bytes {have}-"
            if answer.status == 206 and not said.startswith(f"bytes {have}-"):
                raise ConnectionError(f"it sends another part: {said:.60}")
            if have and answer.status != 206:  # all of it comes again
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
    """Raises PullError, and removes the file, unless its content is what was announced."""
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
            "is not what was announced; it was altered or damaged on the way",
            file=file.name, remedy="try again",
        )  # fmt: skip


def _refused(file: RemoteFile, problem: urllib.error.HTTPError) -> PullError:
    remedy = "try again later"
    if problem.code in (401, 403):
        remedy = "accept the model's terms on its page, and name your token by HF_TOKEN"
    return PullError(
        f"the server answered {problem.code} {problem.reason!s:.100}", file=file.name, remedy=remedy
    )
