"""Sealed files, which only their owner can have written: a TensorRT engine is executable code.

    line      b"mamba-edge sealed 1"
    line      JSON, readable with head -2; `bytes` is the body's length; padded to a page
    body      `bytes` bytes
    seal      HMAC-SHA256 of everything before it, with this user's key

They are in `engines/` of the user's cache folder (mode 0700), beside the key (`key`, 32 random
bytes, mode 0600). There is no protection against processes with the same user id: they can read the
key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge import leftovers
from edge.bundle import strict_json
from edge.bundle.stamps import cache_folder
from edge.errors import EngineError
from edge.replace import replace

MAGIC = b"mamba-edge sealed 1\n"
SEAL = 32
MAX_HEADER = 1 << 20
_KEY_IN_PROGRESS = ".key.making-"
_PAGE = 4096
_BLOCK = 1 << 22
_OTHER_FOLDER = "name another folder of yours: EDGE_CACHE=FOLDER"
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Header = dict[str, Any]


class Damaged(EngineError):
    """A sealed file was altered or sealed by another user; it must be rebuilt."""

    def __init__(self, message: str, *, file: Path, remedy: str | None = None) -> None:
        super().__init__(message, file=file, remedy=remedy or _rebuild_remedy(file))


class Sealed:
    """An open sealed file, fully verified. Close it when the body is no longer needed.

    Attributes:
        header: JSON header that was sealed with the body.
        body: contents, mapped rather than copied.
    """

    def __init__(self, path: Path, header: Header, mapped: mmap.mmap, start: int) -> None:
        self.path = path
        self.header = header
        self._mapped = mapped
        self._view = memoryview(mapped)
        self.body = self._view[start : len(mapped) - SEAL]

    def close(self) -> None:
        self.body.release()
        self._view.release()
        self._mapped.close()

    def __enter__(self) -> Sealed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder() -> Path:
    """Return the folder of engines."""
    return cache_folder() / "engines"


def write(name: str, header: Header, body: bytes | memoryview) -> Path:
    """Seal a file atomically.

    Raises EngineError if the folder cannot be written or belongs to another user.
    """
    directory = _writable_folder()
    leftovers.sweep(directory, _KEY_IN_PROGRESS)
    path = directory / name
    text = json.dumps(header | {"bytes": len(body)}, sort_keys=True).encode()
    # the body starts on a page boundary
    padded = -(-(len(MAGIC) + len(text) + 1) // _PAGE) * _PAGE
    start = MAGIC + text.ljust(padded - len(MAGIC) - 1) + b"\n"
    digest = hmac.new(_key(directory, make=True), start, hashlib.sha256)
    _update(digest, memoryview(body))
    try:
        replace(path, (start, body, digest.digest()))
    except OSError as problem:
        raise _store_error(directory, problem, len(start) + len(body)) from problem
    return path


def read(path: Path) -> Sealed:
    """Open and verify a sealed file.

    Raises FileNotFoundError; EngineError if others own, can read or can write the file; Damaged if
    it is truncated, altered or sealed with another key.
    """
    with _readable(path):
        _check_owner(path.parent, os.stat(path.parent, follow_symlinks=False), "folder")
    with _opened(path) as fd:
        header, start, size = _header(path, fd)
        key = _key(path.parent, make=False)
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    opened = Sealed(path, header, mapped, start)
    view = memoryview(mapped)
    digest = hmac.new(key, digestmod=hashlib.sha256)
    _update(digest, view[:-SEAL])
    is_valid = hmac.compare_digest(digest.digest(), view[-SEAL:])
    view.release()
    if not is_valid:
        opened.close()
        raise Damaged("does not match its seal: it was altered, damaged or copied here", file=path)
    return opened


def peek(path: Path) -> Header:
    """Return a file's header without verifying the seal. Raises as `read` does."""
    with _opened(path) as fd:
        return _header(path, fd)[0]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn OSError into Damaged, except FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise Damaged(f"cannot be read: {problem.strerror or problem}", file=path) from problem


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    with _readable(path):
        fd = os.open(path, _OPEN_FLAGS)
        try:
            _check_owner(path, os.fstat(fd), "file")
            yield fd
        finally:
            os.close(fd)


def _header(path: Path, fd: int) -> tuple[Header, int, int]:
    """Return the header, the offset of the body, and the file's size."""
    size = os.fstat(fd).st_size
    first = os.pread(fd, len(MAGIC) + MAX_HEADER, 0)
    end = first.find(b"\n", len(MAGIC)) + 1
    if not first.startswith(MAGIC) or end == 0:
        raise Damaged("was not written by this version, or is damaged", file=path)
    try:
        header = strict_json.loads(first[len(MAGIC) : end])
        body = header["bytes"]
        if not isinstance(body, int) or body < 0:
            raise ValueError("is not what this version writes")
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise Damaged(f"is damaged: its header: {problem}", file=path) from None
    if size != end + body + SEAL:
        raise Damaged(f"has {size} bytes, its header says {end + body + SEAL}", file=path)
    return header, end, size


def _update(digest: hmac.HMAC, view: memoryview) -> None:
    for at in range(0, len(view), _BLOCK):
        digest.update(view[at : at + _BLOCK])


# -- the folder and its key ------------------------------------------------------------------------


def _writable_folder() -> Path:
    directory = folder()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = os.stat(directory, follow_symlinks=False)
    except OSError as problem:
        raise _store_error(directory, problem) from problem
    _check_owner(directory, info, "folder")
    return directory


def check_writable() -> None:
    """Raise EngineError if files cannot be sealed, which is better known before a long build."""
    directory = _writable_folder()
    _key(directory, make=True)
    probe = directory / f".probe-{secrets.token_hex(8)}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(probe)
    except OSError as problem:
        raise _store_error(directory, problem) from problem


def _key(directory: Path, *, make: bool) -> bytes:
    path = directory / "key"
    try:
        return _read_key(path)
    except FileNotFoundError:
        if not make:
            raise Damaged("the key that engines are sealed with is missing", file=path) from None
    try:
        return _make_key(path)
    except OSError as problem:
        raise _store_error(directory, problem) from problem


def _read_key(path: Path) -> bytes:
    with _opened(path) as fd:
        data = os.pread(fd, SEAL + 1, 0)
    if len(data) != SEAL:
        raise Damaged(f"has {len(data)} bytes, not {SEAL}", file=path, remedy=_rebuild_remedy(path))
    return data


def _make_key(path: Path) -> bytes:
    temporary = path.with_name(f"{_KEY_IN_PROGRESS}{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as stream:
            leftovers.lock(temporary, fd)
            stream.write(secrets.token_bytes(SEAL))
            stream.flush()
            os.fsync(stream.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: use its key
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return _read_key(path)


def _check_owner(path: Path, info: os.stat_result, kind: str) -> None:
    """Raise EngineError for a path that others own, can read or can write."""
    is_kind = stat.S_ISDIR(info.st_mode) if kind == "folder" else stat.S_ISREG(info.st_mode)
    if not is_kind:
        raise EngineError(f"is not a {kind}", file=path, remedy=f"remove it, or {_OTHER_FOLDER}")
    if info.st_uid != os.geteuid():
        raise EngineError(
            f"belongs to user {info.st_uid}, not to you ({os.geteuid()})",
            file=path,
            remedy=_OTHER_FOLDER,
        )
    if info.st_mode & 0o077:
        raise EngineError(
            f"has mode {stat.S_IMODE(info.st_mode):04o}: others may have read or written it",
            file=path,
            remedy=_rebuild_remedy(path),
        )


def _rebuild_remedy(path: Path) -> str:
    return f"remove it with rm -r {path} and build again"


def _store_error(directory: Path, problem: OSError, size: int = 0) -> EngineError:
    needed = f" ({size >> 20} MiB are needed)" if size >> 20 else ""
    return EngineError(
        f"engines cannot be stored here: {problem.strerror or problem}{needed}",
        file=directory,
        remedy=f"make it writable, or {_OTHER_FOLDER}",
    )
