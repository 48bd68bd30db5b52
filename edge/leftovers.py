"""Temporary files and folders beside their target, locked while they are written.

A killed process leaves its file or folder behind, but not the lock: the next process that writes to
the same target notices and removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path

_DIGITS = re.compile("[0-9a-f]{8,16}")  # a file with another suffix may be somebody's own
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def prefix(target: Path, doing: str) -> str:
    """Return the prefix of temporary names for `target`; a random part follows it."""
    # a file name has at most 255 bytes
    return f".{os.fsdecode(os.fsencode(target.name)[:180])}.{doing}-"


# held while something is renamed to its target, and for good when the process ends
publishing = threading.Lock()
writing: set[Path] = set()


def lock(path: Path, fd: int) -> bool:
    """Lock the new file or folder at `path`, open as `fd`, until `fd` is closed.

    Returns False if a sweep removed it before it was locked; the caller makes another.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nothing is swept either
        return True
    try:
        held = os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
    if held:
        # forget paths that this process has published or removed
        writing.difference_update([stale for stale in list(writing) if not os.path.lexists(stale)])
        writing.add(path)
    return held


def sweep(folder: Path, prefix: str) -> None:
    """Remove unused entries of `folder` named `prefix` and hexadecimal digits.

    Nothing depends on their removal, so errors are ignored.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(prefix) and _DIGITS.fullmatch(name, len(prefix)):
                with suppress(OSError):
                    _remove_unused(folder / name)


def _remove_unused(path: Path) -> None:
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # by name: if its writer has just published it, the name is gone or holds the old target
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    finally:
        os.close(fd)


def remove_held() -> None:
    """Remove what this process is writing, as its last act: nothing can be published afterwards."""
    if publishing.acquire(timeout=1):
        for path in list(writing):
            with suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
