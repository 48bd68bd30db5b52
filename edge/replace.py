"""Atomic replacement of a file, which may keep the previous version.

    NAME~               NAME before the last save
    .NAME.saving-HEX    a file being written

The next save or load removes files of the second kind left by killed processes (`edge.leftovers`).
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


def replace(file: Path, parts: Sequence[Buffer], *, keep: bool = False, mode: int = 0o600) -> None:
    """Write `parts` under another name, sync, then rename: a reader sees the old file or the new.

    `keep`: keep the old file as NAME~. `mode`: the new file's permissions, less the umask. A
    symbolic link is followed to its target.

    Raises OSError, also if `file` exists and is not a regular file. The old file is then in place.
    If only syncing the folder failed, the new file is in place, but a loss of power may bring the
    old one back. A failed fsync is not retried: a second one may succeed although data was lost.
    """
    file = _target(file)
    clear(file)
    temporary, fd = _create(file.parent, _prefix(file), mode)
    try:
        with open(fd, "wb") as stream:
            for part in parts:
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
            if keep:
                _keep_previous(file)
            with leftovers.publishing:
                os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(file.parent)


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def clear(file: Path) -> None:
    """Remove leftovers of killed saves to `file`, but no file that a process is still writing."""
    file = Path(os.path.realpath(file))
    leftovers.sweep(file.parent, _prefix(file))


def _prefix(file: Path) -> str:
    return leftovers.prefix(file, "saving")


def _target(file: Path) -> Path:
    """Return `file` with links resolved. Raises OSError for a pipe, a device or a folder."""
    file = Path(os.path.realpath(file))
    with suppress(FileNotFoundError):
        mode = os.lstat(file).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "exists and is not a regular file")
    return file


def _create(folder: Path, prefix: str, mode: int) -> tuple[Path, int]:
    while True:
        path = folder / f"{prefix}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        if leftovers.lock(path, fd):
            return path, fd
        os.close(fd)


def _keep_previous(file: Path) -> None:
    """Link the old file as NAME~ atomically, so that a previous version exists at all times.

    Without hard links none is kept, nor in the place of a pipe, a device or a folder of that name;
    the save continues.
    """
    previous = file.with_name(f"{file.name}~")
    with suppress(OSError):
        with suppress(FileNotFoundError):
            mode = os.lstat(previous).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return
        while not _link_as(file, previous):
            pass


def _link_as(file: Path, previous: Path) -> bool:
    """Give `file` a second name, `previous`. False if a sweep removed the temporary name."""
    temporary = file.with_name(f"{_prefix(file)}{secrets.token_hex(8)}")
    os.link(file, temporary, follow_symlinks=False)
    try:
        os.replace(temporary, previous)
    except FileNotFoundError:
        return False
    finally:
        # renaming one of two names of a file to the other leaves both
        with suppress(OSError):
            os.unlink(temporary)
    return True
