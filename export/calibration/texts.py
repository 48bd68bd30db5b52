"""Calibration text: from any file to a fixed number of token sequences of a fixed length.

The file is read through one descriptor, a block at a time. One small enough to be tokenized whole
is, end to end; of a larger one every sequence is read at its own place, evenly spread. Where there
are more sequences than were asked for, those taken are evenly spread too. Nothing is random.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.errors import EdgeError, ExportError
from edge.export import text_files
from edge.export.checkpoint import Checkpoint
from edge.text.load import make_tokenizer
from edge.text.template import ChatTemplate, Message
from edge.text.tokenizer import Tokenizer

SEQUENCES, LENGTH = 128, 512
GREETINGS = Path(__file__).with_name("greetings.jsonl")
_FIELD = "calibrate"
_BLOCK = 1 << 18
_STRETCH = 1 << 14
_LINE = 1 << 24
# No tokenizer's tokens average more bytes of text; a larger file need not be tokenized whole.
_BYTES_PER_TOKEN = 16


@dataclass(frozen=True)
class TextReader:
    """How a model reads text; without a template a conversation is its turns, one a paragraph."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    def document(self, text: str) -> list[int]:
        """A whole text, with what begins one."""
        bos = self.tokenizer.bos
        start = [bos] if self.tokenizer.add_bos and bos is not None else []
        return start + self.tokenizer.encode(text)

    def conversation(self, messages: list[Message]) -> list[int]:
        if self.template is not None:
            return self.template.encode(messages, add_generation_prompt=False)
        turns = (f"{m.role.capitalize()}: {m.content.strip()}\n\n" for m in messages)
        return self.document("".join(turns))


def checkpoint_reader(
    checkpoint: Checkpoint, config: ModelConfig, tokenizer: Path | None = None
) -> TextReader:
    """A checkpoint's tokenizer and template, as its bundle will have them."""
    info, files = text_files.tokenizer_info(checkpoint, config, tokenizer)
    data = b"" if info.file is None else files[0][0].read_bytes()
    made = make_tokenizer(info, data, str(files[0][0]) if files else "")
    template = text_files.chat_template(checkpoint)
    return TextReader(made, None if template is None else ChatTemplate(template, made))


@dataclass(frozen=True)
class CalibrationText:
    """What is fed to the model.

    Attributes:
        sequences: i64 [S, L], each from an empty state.
        asked: how many were asked for; a short file has fewer.
        file: its name. sha256: of its bytes.
    """

    sequences: NDArray[np.int64]
    asked: int
    file: str
    sha256: str

    def record(self) -> dict[str, Any]:
        """For the manifest."""
        count, length = self.sequences.shape
        return {
            "text": self.file,
            "sha256": self.sha256,
            "sequences": count,
            "sequences_asked": self.asked,
            "length": length,
        }


def read_text(
    path: Path | None, reader: TextReader, count: int = SEQUENCES, length: int = LENGTH
) -> CalibrationText:
    """At most `count` sequences of `length` tokens, evenly spread over the file.

    A `.jsonl` file has an object a line, with "messages" (role and content) or "text"; any other
    is plain text. None reads the conversations the demonstration models greet people with.

    Raises ExportError, field `calibrate`: unreadable, empty, not UTF-8 (at which byte), a line that
    is neither, or fewer tokens than one sequence.
    """
    path = path or GREETINGS
    if count < 1 or length < 1:
        raise ExportError(f"{count} sequences of {length} tokens are none", field=_FIELD)
    try:
        with path.open("rb") as file:
            size, digest = _scan(file, path)
            source = _Source(file, path, reader)
            if size <= count * length * _BYTES_PER_TOKEN:
                rows = _whole(source, count, length)
            else:
                rows = _spread(source, size, count, length)
    except OSError as problem:
        raise _refused(
            path, f"cannot be read: {problem.strerror}", "name a readable file"
        ) from None
    return CalibrationText(np.array(rows, np.int64), count, path.name, digest)


def _refused(path: Path, message: str, remedy: str) -> ExportError:
    return ExportError(message, file=path, field=_FIELD, remedy=remedy)


def _scan(file: BinaryIO, path: Path) -> tuple[int, str]:
    """The file's size and SHA-256, once all of it is known to be UTF-8."""
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    size = 0
    while True:
        block = file.read(_BLOCK)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as problem:
            raise _refused(
                path, f"is not UTF-8 at byte {size - pending + problem.start}", "save it as UTF-8"
            ) from None
        if not block:
            return size, digest.hexdigest()
        digest.update(block)
        size += len(block)


class _Source:
    """Pieces of an open file as token ids, from any byte on."""

    def __init__(self, file: BinaryIO, path: Path, reader: TextReader) -> None:
        self.path = path
        self._file, self._reader = file, reader
        self._lines = path.suffix == ".jsonl"

    def pieces(self, start: int) -> Iterator[list[int]]:
        """Ids of what begins at or after byte `start`: lines, or stretches of plain text."""
        self._file.seek(max(0, start - 1))
        if start:
            # To the next line: the byte before says whether `start` begins one. Plain text without
            # line breaks goes on where it is.
            before = self._file.readline(_LINE if self._lines else _STRETCH)
            if not before.endswith(b"\n") and not self._lines:
                self._file.seek(start)
        return self._objects() if self._lines else self._stretches()

    def _stretches(self) -> Iterator[list[int]]:
        first = self._file.tell() == 0
        rest = b""
        while block := self._file.read(_STRETCH):
            text = rest + block
            cut = max(text.rfind(b"\n"), text.rfind(b" ")) + 1 or _last_character(text)
            text, rest = text[:cut], text[cut:]
            yield self._encode(text, first)
            first = False
        if rest:
            yield self._encode(rest, first)

    def _encode(self, data: bytes, first: bool) -> list[int]:
        # Where a text has no line breaks, a place in it may be within a character: left out.
        text = data.decode("utf-8", errors="ignore")
        return self._reader.document(text) if first else self._reader.tokenizer.encode(text)

    def _objects(self) -> Iterator[list[int]]:
        at = self._file.tell()
        while line := self._file.readline(_LINE):
            if len(line) == _LINE:
                raise self._bad(at, f"is longer than {_LINE} bytes")
            if line.strip():
                yield self._object(line, at)
            at += len(line)

    def _object(self, line: bytes, at: int) -> list[int]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise self._bad(at, f"is not JSON: {problem}") from None
        try:
            if isinstance(value, dict) and isinstance(value.get("text"), str):
                return self._reader.document(value["text"])
            return self._reader.conversation(
                [Message(str(m["role"]), str(m["content"])) for m in value["messages"]]
            )
        except (KeyError, TypeError):
            raise self._bad(at, 'has neither "messages" nor "text"') from None
        except EdgeError as problem:
            raise self._bad(at, f"cannot be tokenized: {problem}") from None

    def _bad(self, at: int, what: str) -> ExportError:
        return _refused(
            self.path, f"the line at byte {at} {what}",
            'give a line for each object, with "messages" or "text"',
        )  # fmt: skip


def _last_character(text: bytes) -> int:
    """Where the last character begins, whole or not."""
    at = len(text) - 1
    while at > 0 and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _whole(source: _Source, count: int, length: int) -> list[list[int]]:
    """The file's tokens end to end, cut into sequences, of which `count` are taken."""
    ids = [token for piece in source.pieces(0) for token in piece]
    there = len(ids) // length
    if not ids:
        raise _refused(source.path, "holds no text", "give a text of the kind the model is for")
    if not there:
        raise _refused(
            source.path, f"has {len(ids)} tokens, too few for one sequence of {length}",
            "give more text, or ask for shorter sequences",
        )  # fmt: skip
    taken = min(count, there)
    starts = [i * there // taken * length for i in range(taken)]
    return [ids[start : start + length] for start in starts]


def _spread(source: _Source, size: int, count: int, length: int) -> list[list[int]]:
    """A sequence from each of `count` places; none where what follows is too short."""
    rows = []
    for i in range(count):
        ids: list[int] = []
        for piece in source.pieces(i * size // count):
            ids += piece
            if len(ids) >= length:
                rows.append(ids[:length])
                break
    if not rows:
        raise _refused(
            source.path, f"has no {length} tokens in a row", "give a text of another kind"
        )
    return rows
