"""SHA-256 of what an open descriptor holds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

BLOCK = 1 << 20


def blocks(fd: int, size: int) -> Iterator[bytes]:
    """Content by position, so that the descriptor's own offset stays untouched."""
    offset = 0
    while offset < size:
        block = os.pread(fd, min(BLOCK, size - offset), offset)
        if not block:
            return
        offset += len(block)
        yield block


def sha256(fd: int, size: int) -> str:
    """Hexadecimal SHA-256 of the first `size` bytes."""
    digest = hashlib.sha256()
    for block in blocks(fd, size):
        digest.update(block)
    return digest.hexdigest()
