"""Read files of an untrusted checkpoint: only regular files, of bounded size, inside it.

A pipe would block, a device would never end, and a link could name a file of this machine, which
would be copied into the bundle. Links within the checkpoint are followed, and so are those of
Hugging Face's cache, from `snapshots/REVISION` to `blobs` next to it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge.errors import CheckpointError

MAX_TEXT_BYTES = 64 << 20  # for large tokenizers; the index of a large sharded model has 100 kB
MAX_TEMPLATE_BYTES = 1 << 20
_COPY_REMEDY = "copy the file itself into the checkpoint; cp -L does"


def check_file(path: Path, limit: int = MAX_TEXT_BYTES) -> None:
    """Raise CheckpointError unless `path` is a regular file of the checkpoint, within `limit`."""
    os.close(_open(path, limit))


def read_file(path: Path, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Return the content of a file. Raises CheckpointError as `check_file` does."""
    with open(_open(path, limit), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"grew beyond {limit} bytes while it was read", file=path)
    return data


def read_utf8(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file. Raises CheckpointError as `read_file`, and if it is not UTF-8."""
    try:
        return read_file(path, limit).decode("utf-8")
    except UnicodeDecodeError as problem:
        raise CheckpointError(f"is not UTF-8 at byte {problem.start}", file=path) from None


def leads_out(path: Path) -> bool:
    """Return whether a path is a link to something outside the checkpoint."""
    if not path.is_symlink():
        return False
    folder, target = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    cached = target.parent in (folder.parent / "blobs", folder.parent.parent / "blobs")
    return not cached and not target.is_relative_to(folder)


def _open(path: Path, limit: int) -> int:
    """Open a file of the checkpoint and return its descriptor, which the caller closes."""
    if leads_out(path):
        raise CheckpointError("is a link to a file outside", file=path, remedy=_COPY_REMEDY)
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
        raise CheckpointError(
            "cannot be read: it is not a regular file", file=path, remedy=_COPY_REMEDY
        )
    return fd
