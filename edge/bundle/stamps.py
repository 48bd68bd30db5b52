"""Stamps that avoid hashing gigabytes at every start.

A stamp records that a file with this device, inode, size, modification and change time had the
right SHA-256. Stamps are kept for large files only, in the user's cache folder, never in the
bundle. They guard against damage and mix-ups, not against someone with the same user id.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from edge.bundle.manifest import FileEntry
from edge.replace import replace

SMALLEST = 64 << 20


def cache_folder() -> Path:
    """Return `$EDGE_CACHE`, or `$XDG_CACHE_HOME/mamba-edge`, or `~/.cache/mamba-edge`."""
    if configured := os.environ.get("EDGE_CACHE"):
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "mamba-edge"


def _stamp(fingerprint: str, entry: FileEntry, fd: int) -> tuple[Path, str]:
    info = os.fstat(fd)
    identity = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    name = hashlib.sha256(f"{fingerprint}\0{entry.path}\0{identity[:2]}".encode()).hexdigest()
    return cache_folder() / "stamps" / name, f"{entry.sha256} {identity}\n"


def is_known(fingerprint: str, entry: FileEntry, fd: int) -> bool:
    """Return whether this file was hashed before and, by its metadata, has not changed since."""
    if entry.size < SMALLEST:
        return False
    path, text = _stamp(fingerprint, entry, fd)
    try:
        return path.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


def remember(fingerprint: str, entry: FileEntry, fd: int) -> None:
    """Record that the file was hashed; without a writable cache the next start hashes again."""
    if entry.size < SMALLEST:
        return
    path, text = _stamp(fingerprint, entry, fd)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(path, [text.encode()])
