"""A file is replaced whole or not at all, and the one before it is kept.

    NAME~               what NAME was before the last save
    .NAME.saving-HEX    being written

After `edge.leftovers`, what a killed process left of the second kind is removed by the next save
or load.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edge import leftovers

Buffer = bytes | memoryview


def replace(file: Path, parts: Sequence[Buffer], *, keep: bool = True) -> None:
    """Put `parts` on disk under another name, then rename: a reader sees the old file or the new.

    Not `keep`: without a NAME~.

    A link is followed to the file that it names.

    Raises OSError, also where something is there that is no regular file. The old file is then in
    place; or, where the folder alone could not be synced, the new one is, and may be the old one
    again after a loss of power. Nothing is tried twice: a second fsync may succeed although what
    the first one lost is lost.
    """
    file = _target(file)
    clear(file)
    temporary, fd = _create(file.parent, _prefix(file))
    try:
        with open(fd, "wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
            if keep:
                _keep(file)
            with leftovers.publishing:
                os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(file.parent)


def clear(file: Path) -> None:
    """Remove what killed processes left of saves to `file`, and nothing that one is writing."""
    file = Path(os.path.realpath(file))
    leftovers.sweep(file.parent, _prefix(file))


def _prefix(file: Path) -> str:
    return leftovers.prefix(file, "saving")


def _target(file: Path) -> Path:
    """The file that `file` is or links to. Raises OSError for a pipe, a device and a folder."""
    file = Path(os.path.realpath(file))
    with suppress(FileNotFoundError):
        mode = os.lstat(file).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "exists and is not a regular file")
    return file


def _create(folder: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if leftovers.lock(path, fd):
            return path, fd
        os.close(fd)


def _keep(file: Path) -> None:
    """The old file gets a second name in one step: at any time there is a file before the last.

    Without hard links there is none, and the save continues.
    """
    kept = file.with_name(f"{file.name}~")
    with suppress(OSError):
        while not _renamed(file, kept):
            pass


def _renamed(file: Path, kept: Path) -> bool:
    """Give `file` the name `kept` too; False where a sweep took the passing name for a leftover."""
    passing = file.with_name(f"{_prefix(file)}{secrets.token_hex(8)}")
    os.link(file, passing, follow_symlinks=False)
    try:
        os.replace(passing, kept)
    except FileNotFoundError:
        return False
    finally:
        # of two names of one file, a rename leaves both
        with suppress(OSError):
            os.unlink(passing)
    return True


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
