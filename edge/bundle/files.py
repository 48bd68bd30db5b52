"""Files of a bundle: paths inside its folder, opened without following links, and hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator

from edge.errors import BundleError
from edge.log import Progress

MAX_PATH = 255
BLOCK = 1 << 20
MAY_BE_HOLES, _PLACES = 1 << 30, 256
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


def is_mostly_holes(fd: int, size: int) -> bool:
    """Return whether less than half of a file of at least 1 GiB was ever written.

    A hole takes no disk and hashes like zeros, at a gigabyte per second or two. Weights hold hardly
    any. Places are drawn at random, since data at known places would be cheap. Allocated blocks
    would not do: a file system that compresses counts few of them, others none.
    """
    if size < MAY_BE_HOLES:
        return False
    written = 0
    for _ in range(_PLACES):
        place = secrets.randbelow(size)
        try:
            written += os.lseek(fd, place, os.SEEK_DATA) == place
        except OSError as problem:  # ENXIO: no data up to the end; else holes are unknown here
            written += problem.errno != errno.ENXIO
    os.lseek(fd, 0, os.SEEK_SET)
    return written < _PLACES // 2


def sha256(fd: int, size: int, on_progress: Progress | None = None) -> str:
    """Return the hexadecimal SHA-256 of the first `size` bytes."""
    digest, done = hashlib.sha256(), 0
    for block in blocks(fd, size):
        digest.update(block)
        done += len(block)
        if on_progress is not None:
            on_progress("checking", done, size)
    return digest.hexdigest()
