"""Temporary files and folders beside their target, which are locked while they are written.

A process that is killed leaves such a file or folder behind, without its lock: the next one that
writes to the same target can tell, and removes it.
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

_DIGITS = re.compile("[0-9a-f]{8,16}")  # of another name somebody may have made a file
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def prefix(target: Path, doing: str) -> str:
    """How the names begin that belong to `target`; a random part makes them different."""
    # bytes, of which a name has at most 255
    return f".{os.fsdecode(os.fsencode(target.name)[:180])}.{doing}-"


# held while something gets the name that it is to have, and for good when the process ends
publishing = threading.Lock()
writing: set[Path] = set()


def lock(path: Path, fd: int) -> bool:
    """Mark what was just made at `path`, open as `fd`, as in use until `fd` is closed.

    False: a sweep took it for a leftover in the moment between; make another.
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
        # others of this process are published or removed by now
        writing.difference_update([each for each in list(writing) if not os.path.lexists(each)])
        writing.add(path)
    return held


def sweep(folder: Path, prefix: str) -> None:
    """Remove what is called `prefix` and hexadecimal digits in `folder` and is not in use. Nothing
    depends on it, so what cannot be removed stays.
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
        # by its name: if its writer has just published it, the name is gone or holds what was old
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    finally:
        os.close(fd)


def remove_held() -> None:
    """Remove what this process is writing, as its last act: nothing is published after it."""
    if publishing.acquire(timeout=1):
        for path in list(writing):
            with suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
