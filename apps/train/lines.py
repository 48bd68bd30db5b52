"""Files that grow line by line, and resume where an earlier run ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path


def whole_lines(path: Path) -> int:
    """Count the lines of a file, and cut off an incomplete line that a killed run left."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("rb+") as file:
            file.truncate(end)
    return content.count(b"\n")


def go_on(path: Path, records: Callable[[int], Iterable[object]]) -> None:
    """Append a line of JSON for every record, starting where an earlier run ended.

    `records(done)` yields the records after the first `done`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = whole_lines(path)
    with path.open("a", encoding="utf-8") as file:
        for record in records(done):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
