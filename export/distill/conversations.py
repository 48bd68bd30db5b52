"""Conversations as rows of tokens, in which what is not an answer is known as such.

A row holds one conversation, cut or filled up to a length. Of ids that are no answer's, the ids of
what was asked, of the template's own words and of the filling, the complement ~id is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError, ExportError
from edge.export.calibration.texts import TextReader
from edge.export.distill.rows import EVERY, HELD_OUT, TokenRows
from edge.text.template import ChatTemplate, Message


def one_conversation(line: dict[str, Any]) -> Sequence[Any]:
    """`{"messages": […]}`"""
    return [line["messages"]]


def two_answers(line: dict[str, Any]) -> Sequence[Any]:
    """`{"prompt": …, "chosen": …, "rejected": …}`; or whole conversations chosen and rejected."""
    sides = [line["chosen"], line["rejected"]]
    if all(isinstance(side, list) for side in sides) and "prompt" not in line:
        return sides
    asked = line["prompt"]
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return [
        before + (side if isinstance(side, list) else [{"role": "assistant", "content": side}])
        for side in sides
    ]


# a line's object → the conversations that a row is made of, and how it is written
FORMS: dict[str, tuple[Callable[[dict[str, Any]], Sequence[Any]], str]] = {
    "a conversation": (
        one_conversation,
        '{"messages": [{"role": "user", "content": …}, {"role": "assistant", …}]}',
    ),
    "a preference": (
        two_answers, '{"prompt": text or messages, "chosen": text, "rejected": text}'
    ),
}  # fmt: skip


def answered(template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation, ~id where they are not of what the assistant says."""
    ids = template.encode(messages, add_generation_prompt=False)
    said = np.zeros(len(ids), bool)
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            prompt = template.encode(messages[:turn])
            whole = template.encode(messages[: turn + 1], add_generation_prompt=False)
            said[_common(prompt, ids) : _common(whole, ids)] = True
    return [i if own else ~i for i, own in zip(ids, said, strict=True)]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def read_conversations(
    files: Sequence[Path], reader: TextReader, length: int, wanted: int | None,
    valid: Path | None, form: str,
) -> TokenRows:  # fmt: skip
    """Rows [n, length], or [n, 2, length] of preferences, of .jsonl files; `wanted`: about so many
    tokens, of every file as many, evenly spread; `form`: of FORMS.

    Conversations without a token to learn in their first `length` are left out. Raises ExportError:
    no chat template, a file that cannot be read, or a line that is of another `form`.
    """
    if reader.template is None:
        raise ExportError(
            "has no chat template, so the beginning of answers is unknown", field="teacher",
            remedy="give a checkpoint whose tokenizer_config.json has one",
        )  # fmt: skip
    sides = 2 if form == "a preference" else 1
    most = None if wanted is None else HELD_OUT + -(-wanted // (sides * length * len(files)))
    found: list[list[list[int]]] = []
    texts = []
    for file in files:
        rows, told = _rows(file, reader.template, length, form, most)
        texts.append({**told, "rows": len(rows)})
        found += rows
    of_valid = None
    if valid is not None:
        held, of_valid = _rows(valid, reader.template, length, form, HELD_OUT)
    else:
        count = min(HELD_OUT, len(found) // EVERY) or 1
        held, found = found[-count:], found[:-count]
    if not found or not held:
        raise ExportError(
            "holds too few conversations with answers", file=valid or files[0], field="text",
            remedy="give more, or a larger --length",
        )  # fmt: skip
    record: dict[str, object] = {"text": texts, "valid": of_valid}
    return TokenRows(_array(found), _array(held), record)


def _array(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """[n, sides, T], or [n, T] of one side."""
    found = np.array(rows, np.int32)
    return found[:, 0] if found.shape[1] == 1 else found


def _rows(
    file: Path, template: ChatTemplate, length: int, form: str, most: int | None
) -> tuple[list[list[list[int]]], dict[str, object]]:
    """At most `most` rows of a file, evenly spread, and what it is."""
    try:
        data = file.read_bytes()
        lines = [(n, line) for n, line in enumerate(data.decode().split("\n"), 1) if line.strip()]
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or "is not UTF-8"
        raise ExportError(f"cannot be read: {reason}", file=file, field="text") from None
    taken = min(len(lines), most or len(lines))
    sides, written = FORMS[form]
    rows = []
    for number, line in (lines[at * len(lines) // taken] for at in range(taken)):
        try:
            talks = [
                [Message(str(m["role"]), str(m["content"])) for m in talk]
                for talk in sides(json.loads(line))
            ]
            row = [answered(template, talk) for talk in talks]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, EdgeError) as why:
            detail = f": {why.message}" if isinstance(why, EdgeError) else ""
            raise ExportError(
                f"line {number} is not {form}{detail}",
                file=file,
                field="text",
                remedy=f"give lines of {written}",
            ) from None
        if all(any(i >= 0 for i in ids[1:length]) for ids in row):
            rows.append([ids[:length] + [~0] * (length - len(ids)) for ids in row])
    return rows, {"file": file.name, "sha256": hashlib.sha256(data).hexdigest()}
