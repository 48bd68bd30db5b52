"""Prompts for measurements: a few of our own, or those of a file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from edge.errors import InputError

# typical requests to a small model; answers to greetings are too short to measure
DEFAULT = (
    "Tell me a short story about a girl and her dog.",
    "What did the boy find in the garden? Tell me all about it.",
    "Write about a rainy day at the sea.",
    "Tell me a story about a bird that wanted to be friends with a cat.",
)
MOST_BYTES = 64 << 20
# fields that hold the prompt in MT-bench, GSM8K, HumanEval and other sets
_FIELDS = ("turns", "question", "prompt", "text")


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return every prompt of a file, which may be gzipped: one per line.

    In JSON lines the prompt is the first of the fields turns, question, prompt and text; of turns,
    the first one.

    Raises InputError when the file cannot be read or holds no prompt.
    """
    prompts = tuple(_parse(path, _read_text(path)))
    if not prompts:
        raise InputError("holds no prompt", file=path, remedy="write one per line, or JSON lines")
    return prompts


def _read_text(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as problem:
        raise InputError(
            f"cannot be read: {getattr(problem, 'strerror', None) or problem}", file=path
        ) from None
    if len(data) > MOST_BYTES:
        raise InputError(f"is larger than {MOST_BYTES} bytes", file=path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(f"is not UTF-8 at byte {problem.start}", file=path) from None


def _parse(path: Path, text: str) -> Iterator[str]:
    is_json = ".jsonl" in path.suffixes
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _prompt_of(path, number, line) if is_json else line.strip()


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"is not JSON: {problem}", file=path, field=f"line {number}") from None
    for name in _FIELDS if isinstance(row, dict) else ():
        value = row.get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        if isinstance(value, str) and value:
            return value
    raise InputError(
        "has no prompt",
        file=path,
        field=f"line {number}",
        remedy=f"give one of {', '.join(_FIELDS)}",
    )
