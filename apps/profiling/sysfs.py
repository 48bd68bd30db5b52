"""Small files the kernel shows: read whole, absent rather than an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def text(path: Path) -> str | None:
    """A file's content without blanks around it; None where it cannot be read, or is empty."""
    try:
        return path.read_text(errors="replace").strip("\0 \n") or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file that holds one whole number."""
    found = text(path)
    try:
        return None if found is None else int(found)
    except ValueError:
        return None


def folders(parent: Path, pattern: str) -> Iterator[Path]:
    """Folders by name, those with numbers in their numbers' order."""
    try:
        yield from sorted(parent.glob(pattern), key=lambda path: (len(path.name), path.name))
    except OSError:
        return
