"""Files of a bundle: paths inside its folder, opened without following links, and hashes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator

from edge.errors import BundleError
from edge.log import Progress

MAX_PATH = 255
BLOCK = 1 << 20
REMEDY = "export the model again, or copy the bundle whole"


def check_relative(path: str) -> None:
    """Raise ValueError unless `path` is a plain relative path: printable parts joined by `/`."""
    if not path or len(path) > MAX_PATH:
        raise ValueError(f"a path of {len(path)} characters, 1 to {MAX_PATH} are allowed")
    if "\\" in path or not path.isascii() or not path.isprintable():
        raise ValueError(f"path {path!r} has a backslash or an unprintable or non-ASCII character")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError(f"path {path!r} leaves the folder or is not in plain form")


def open_inside(folder_fd: int, path: str, *, folder: str) -> int:
    """Open a regular file below an open folder, following no link at any step.

    Returns a file descriptor that the caller closes. Raises BundleError naming the file. Hard links
    are allowed: installers create them when they copy packages out of their caches.
    """
    try:
        check_relative(path)
    except ValueError as problem:
        raise BundleError(str(problem), file=folder, field="files.path") from None
    *parents, name = path.split("/")
    directory = os.dup(folder_fd)
    try:
        for part in parents:
            child = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = child
        # O_NONBLOCK: opening a FIFO put in a file's place must not hang
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except FileNotFoundError:
        raise BundleError("is missing", file=f"{folder}/{path}", remedy=REMEDY) from None
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise BundleError(
            f"cannot be opened as a plain file: {reason}",
            file=f"{folder}/{path}",
            remedy="a bundle holds regular files, no links; export it again or copy it whole",
        ) from None
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BundleError("is not a regular file", file=f"{folder}/{path}", remedy=REMEDY)
    return fd


def blocks(fd: int, size: int) -> Iterator[bytes]:
    """Yield the content in blocks, read by position: the descriptor's own offset is unchanged."""
    offset = 0
    while offset < size:
        block = os.pread(fd, min(BLOCK, size - offset), offset)
        if not block:
            return
        offset += len(block)
        yield block


def sha256(fd: int, size: int, on_progress: Progress | None = None) -> str:
    """Return the hexadecimal SHA-256 of the first `size` bytes."""
    digest, done = hashlib.sha256(), 0
    for block in blocks(fd, size):
        digest.update(block)
        done += len(block)
        if on_progress is not None:
            on_progress("checking", done, size)
    return digest.hexdigest()
