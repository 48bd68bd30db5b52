"""Files of a checkpoint, which a stranger may have made: regular ones, of bounded size, of its own.

A pipe would be waited for, a device read without end, and a link may name a file of this machine,
which would be copied into the bundle. Links within the checkpoint are followed, and those of
Hugging Face's cache, from `snapshots/REVISION` to the `blobs` beside.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge.errors import CheckpointError

MAX_TEXT_BYTES = 64 << 20  # of a tokenizer; an index of a large sharded model has 100 kB
MAX_TEMPLATE_BYTES = 1 << 20
_OWN = "copy the file itself into the checkpoint; cp -L does"


def check_file(path: Path, limit: int = MAX_TEXT_BYTES) -> None:
    """Raise CheckpointError unless `path` is a regular file of the checkpoint, within `limit`."""
    os.close(_opened(path, limit))


def read_file(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Its content. Raises CheckpointError as `check_file` does."""
    with open(_opened(path, limit), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"grew beyond {limit} bytes while it was read", file=path)
    return data


def read_utf8(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Its text. Raises CheckpointError: also where it is not UTF-8."""
    try:
        return read_file(path, limit).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"is not UTF-8 at byte {problem.start}", file=path) from None


def leads_out(path: Path) -> bool:
    """Whether it is a link to something that is not of the checkpoint."""
    if not path.is_symlink():
        return False
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    cached = target.parent in (folder.parent / "blobs", folder.parent.parent / "blobs")
    return not cached and not target.is_relative_to(folder)


def _opened(path: Path, limit: int) -> int:
    """A descriptor, which the caller closes."""
    if leads_out(path):
        raise CheckpointError("is a link to a file elsewhere", file=path, remedy=_OWN)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise CheckpointError(
            f"cannot be read: {problem.strerror}", file=path, remedy="check that it exists"
        ) from problem
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        os.close(fd)
        if stat.S_ISREG(info.st_mode):
            raise CheckpointError(
                f"larger than {limit} bytes", file=path, remedy="is it a weight file?"
            )
        raise CheckpointError("cannot be read: it is not a regular file", file=path, remedy=_OWN)
    return fd
