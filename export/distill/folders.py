"""Write folders atomically, and lock a folder for one process."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.errors import ExportError
from edge.replace import sync


def sync_tree(folder: Path) -> None:
    """Sync a folder and its contents to disk."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        sync(path)


def replace_folder(temporary: Path, final: Path) -> None:
    """Replace a folder with a finished one; the older one is deleted only afterwards."""
    sync_tree(temporary)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create a folder and lock it. Raises ExportError when another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(
                "another process is working on this run", file=folder,
                remedy="wait until it ends, or choose another -o",
            ) from None  # fmt: skip
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
