"""Read conversations and documents from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GREETINGS = Path(__file__).with_name("greetings.jsonl")
DOCUMENT_END = "<|endoftext|>"


@dataclass(frozen=True)
class Conversation:
    """Turns as (role, content) pairs, and the collection they came from."""

    turns: tuple[tuple[str, str], ...]
    source: str


def read_conversations(path: Path) -> Iterator[Conversation]:
    """One conversation a line: {"messages": [{"role", "content"}, ...], "source"}."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            turns = tuple((m["role"], m["content"].strip()) for m in record["messages"])
            yield Conversation(turns, record.get("source", "greetings"))


def read_documents(path: Path) -> Iterator[str]:
    """Documents that end with a line `<|endoftext|>`."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.rstrip("\n") == DOCUMENT_END:
                yield "".join(lines)
                lines = []
            else:
                lines.append(line)
    if lines:
        yield "".join(lines)
