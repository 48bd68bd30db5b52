"""A file is replaced whole or not at all, and the one before it is kept.

    NAME~               what NAME was before the last save
    .NAME.saving-HEX    being written

After `edge.leftovers`, what a killed process left of the second kind is removed by the next save.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edge import leftovers

Buffer = bytes | memoryview


def replace(file: Path, parts: Sequence[Buffer], *, keep: bool = True) -> None:
    """Put `parts` on disk under another name, then rename: a reader sees the old file or the new.

    Not `keep`: without a NAME~.

    Raises OSError. The old file is then in place; or, where the folder alone could not be synced,
    the new one is, and may be the old one again after a loss of power. Nothing is tried twice: a
    second fsync may succeed although what the first one lost is lost.
    """
    prefix = leftovers.prefix(file, "saving")
    leftovers.sweep(file.parent, prefix)
    temporary, fd = _create(file.parent, prefix)
    try:
        with open(fd, "wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
            if keep:
                _keep(file)
            os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(file.parent)


def _create(folder: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if leftovers.lock(path, fd):
            return path, fd
        os.close(fd)


def _keep(file: Path) -> None:
    """The old file gets a second name. Without hard links there is none, and the save goes on."""
    before = file.with_name(f"{file.name}~")
    with suppress(OSError):
        os.lstat(file)
        before.unlink(missing_ok=True)
        os.link(file, before, follow_symlinks=False)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
