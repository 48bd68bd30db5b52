"""Read text files as documents, in bounded memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from edge.errors import InputError
from edge.text.template import Message

# a line that holds only this ends a document and is not part of any text
DOCUMENT_END = "<|endoftext|>"
# characters encoded at once; a longer document is cut at a line end and continues from its state
MAX_STRETCH = 4 << 20
MAX_LINE = 1 << 20
_MAX_RECORD = 64 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Stretch:
    """Consecutive text of a document. `first`: whether the document begins with it."""

    text: str
    first: bool


@dataclass(frozen=True)
class Dialogue:
    """A document that is a conversation."""

    messages: tuple[Message, ...]


Block = Stretch | Dialogue


def read_texts(paths: Sequence[Path], progress: Progress = lambda size: None) -> Iterator[Block]:
    """Yield every document of every file, in order. No document spans two files.

    A `.jsonl` file holds one JSON object per line, with `messages` or `text`. Any other file is
    plain text whose documents end with a line `<|endoftext|>`. `progress` receives the number of
    bytes read since its last call. Raises InputError for a file that cannot be read, is empty or
    is not UTF-8, and for a line that is not such an object.
    """
    for path in paths:
        found = False
        for block in (
            _records(path, progress) if path.suffix == ".jsonl" else _plain(path, progress)
        ):
            found = True
            yield block
        if not found:
            raise InputError("holds no text", file=path, remedy="give a file with some text")


def total_bytes(paths: Sequence[Path]) -> int:
    """Return the total size of all files in bytes. Raises InputError when one does not exist."""
    size = 0
    for path in paths:
        if not path.is_file():
            raise InputError("is not a file", file=path, remedy="give the path of a text file")
        size += path.stat().st_size
    return size


def _plain(path: Path, progress: Progress) -> Iterator[Stretch]:
    pending: list[str] = []
    size, first, at_line_start = 0, True, True  # `at_line_start`: of the next piece
    for line in _lines(path, MAX_LINE, progress):
        if at_line_start and line.rstrip("\r\n") == DOCUMENT_END:
            if pending:
                yield Stretch("".join(pending), first)
            pending, size, first = [], 0, True
            continue
        at_line_start = line.endswith("\n")
        pending.append(line)
        size += len(line)
        if size >= MAX_STRETCH:
            yield Stretch("".join(pending), first)
            pending, size, first = [], 0, False
    if pending:
        yield Stretch("".join(pending), first)


def _records(path: Path, progress: Progress) -> Iterator[Block]:
    for number, line in enumerate(_lines(path, _MAX_RECORD, progress), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(
                f"is not JSON: {problem}", file=path, field=f"line {number}",
                remedy="a .jsonl file holds one JSON object a line",
            ) from None  # fmt: skip
        yield _block(record, path, number)


def _block(record: Any, path: Path, number: int) -> Block:
    record = record if isinstance(record, dict) else {}
    text, messages = record.get("text"), record.get("messages")
    if isinstance(text, str) and messages is None:
        return Stretch(text, True)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return Dialogue(tuple(Message(m["role"], m["content"]) for m in messages))
    raise InputError(
        "has neither a text nor messages with role and content",
        file=path, field=f"line {number}",
        remedy='write {"messages": [{"role": "user", "content": "…"}, …]} or {"text": "…"}',
    )  # fmt: skip


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _lines(path: Path, max_length: int, progress: Progress) -> Iterator[str]:
    """Yield lines with their line ends unchanged; lines over `max_length` characters in pieces."""
    try:
        # keep "\r\n": every byte of the file is counted
        with path.open(encoding="utf-8", newline="\n") as file:
            try:
                yield from _read_lines(file, max_length, progress)
            except UnicodeDecodeError:
                raise InputError(
                    f"is not UTF-8 at byte {_first_bad_byte(path)}", file=path,
                    remedy="convert it to UTF-8",
                ) from None  # fmt: skip
    except OSError as problem:
        raise InputError(f"cannot be read: {problem.strerror}", file=path) from None


def _read_lines(file: TextIO, max_length: int, progress: Progress) -> Iterator[str]:
    while line := file.readline(max_length):
        yield line
        progress(len(line.encode()))


def _first_bad_byte(path: Path) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block)
            except UnicodeDecodeError as problem:
                return offset - pending + problem.start
            offset += len(block)
    return offset - len(decoder.getstate()[0])  # the file ends within a character
