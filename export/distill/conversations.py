"""Read conversations as rows of tokens, with the tokens outside answers marked.

A row holds one conversation, truncated or padded to a length. The ids of prompts, of the template's
own text and of the padding are stored as their complement ~id.
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
    """Return the conversation of a line `{"messages": […]}`."""
    return [line["messages"]]


def two_answers(line: dict[str, Any]) -> Sequence[Any]:
    """Return both conversations of a line `{"prompt": …, "chosen": …, "rejected": …}`.

    `chosen` and `rejected` may also be whole conversations, without `prompt`.
    """
    sides = [line["chosen"], line["rejected"]]
    if all(isinstance(side, list) for side in sides) and "prompt" not in line:
        return sides
    prompt = line["prompt"]
    history = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [
        history + (side if isinstance(side, list) else [{"role": "assistant", "content": side}])
        for side in sides
    ]


# name of a form → function from a line's object to the conversations of a row, and an example
FORMS: dict[str, tuple[Callable[[dict[str, Any]], Sequence[Any]], str]] = {
    "a conversation": (
        one_conversation,
        '{"messages": [{"role": "user", "content": …}, {"role": "assistant", …}]}',
    ),
    "a preference": (
        two_answers, '{"prompt": text or messages, "chosen": text, "rejected": text}'
    ),
}  # fmt: skip


def answered(template: ChatTemplate, messages: Sequence[Message], length: int) -> list[int]:
    """Return the first `length` ids of a conversation, with ~id outside the assistant's answers."""
    ids = template.encode(messages, add_generation_prompt=False)[:length]
    in_answer = np.zeros(len(ids), bool)
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            start = _common_prefix(template.encode(messages[:turn]), ids)
            if start >= length:  # each turn encodes all that is before it
                break
            whole = template.encode(messages[: turn + 1], add_generation_prompt=False)
            in_answer[start : _common_prefix(whole, ids)] = True
    return [i if learned else ~i for i, learned in zip(ids, in_answer, strict=True)]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def read_conversations(
    files: Sequence[Path], reader: TextReader, length: int, wanted: int | None,
    valid: Path | None, form: str,
) -> TokenRows:  # fmt: skip
    """Read .jsonl files as rows [n, length], or [n, 2, length] for preferences.

    `wanted` limits the rows to about that number of tokens, the same from every file, evenly
    spread; `form` is a key of FORMS. Conversations without a token to learn in their first `length`
    are left out. Raises ExportError when there is no chat template, a file cannot be read, or a
    line has another form.
    """
    if reader.template is None:
        raise ExportError(
            "has no chat template to tell where answers begin", field="teacher",
            remedy="give a checkpoint whose tokenizer_config.json has one",
        )  # fmt: skip
    sides = 2 if form == "a preference" else 1
    limit = None if wanted is None else HELD_OUT + -(-wanted // (sides * length * len(files)))
    learned: list[list[list[int]]] = []
    texts = []
    for file in files:
        rows, description = _read_rows(file, reader.template, length, form, limit)
        texts.append({**description, "rows": len(rows)})
        learned += rows
    valid_record = None
    if valid is not None:
        held_out, valid_record = _read_rows(valid, reader.template, length, form, HELD_OUT)
    else:
        count = min(HELD_OUT, len(learned) // EVERY) or 1
        held_out, learned = learned[-count:], learned[:-count]
    if not learned or not held_out:
        raise ExportError(
            "holds too few conversations with answers", file=valid or files[0], field="text",
            remedy="give more, or a larger --length",
        )  # fmt: skip
    record: dict[str, object] = {"text": texts, "valid": valid_record}
    return TokenRows(_array(learned), _array(held_out), record)


def _array(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Return an array [n, sides, T], or [n, T] if there is one side."""
    array = np.array(rows, np.int32)
    return array[:, 0] if array.shape[1] == 1 else array


def _read_rows(
    file: Path, template: ChatTemplate, length: int, form: str, limit: int | None
) -> tuple[list[list[list[int]]], dict[str, object]]:
    """Return at most `limit` rows of a file, evenly spread, and a description of the file."""
    try:
        data = file.read_bytes()
        lines = [(n, line) for n, line in enumerate(data.decode().split("\n"), 1) if line.strip()]
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or "is not UTF-8"
        raise ExportError(f"cannot be read: {reason}", file=file, field="text") from None
    count = min(len(lines), limit or len(lines))
    conversations_of, example = FORMS[form]
    rows = []
    for number, line in (lines[index * len(lines) // count] for index in range(count)):
        try:
            conversations = [
                [Message(str(m["role"]), str(m["content"])) for m in messages]
                for messages in conversations_of(json.loads(line))
            ]
            row = [answered(template, messages, length) for messages in conversations]
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            EdgeError,
        ) as error:
            detail = f": {error.message}" if isinstance(error, EdgeError) else ""
            raise ExportError(
                f"line {number} is not {form}{detail}",
                file=file,
                field="text",
                remedy=f"give lines of {example}",
            ) from None
        if all(any(i >= 0 for i in ids[1:]) for ids in row):
            rows.append([ids + [~0] * (length - len(ids)) for ids in row])
    return rows, {"file": file.name, "sha256": hashlib.sha256(data).hexdigest()}
