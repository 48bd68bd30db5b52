"""Calibration text: read a file as a fixed number of token sequences of a fixed length.

The file is read through one descriptor, a block at a time. A small file is tokenized whole, end to
end. In a larger file, sequences are read at evenly spaced places. If there are more sequences than
requested, the ones used are evenly spaced too. Nothing is random.
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
_CHUNK = 1 << 14
_MAX_LINE = 1 << 24
# Upper bound of a tokenizer's average bytes per token: a larger file need not be tokenized whole.
_BYTES_PER_TOKEN = 16
# Bytes per token that most text has at most: so many of a piece are tokenized first, if few of its
# tokens are wanted. Words behind the last wanted token show that the rest cannot change it.
_USUAL_BYTES_PER_TOKEN = 6
_WORDS_BEHIND = 8


@dataclass(frozen=True)
class TextReader:
    """A model's tokenizer and template; without one, each turn of a conversation is a paragraph."""

    tokenizer: Tokenizer
    template: ChatTemplate | None = None

    def document(self, text: str) -> list[int]:
        """Tokenize a whole text, including the tokens that begin one."""
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
    """Return a checkpoint's tokenizer and template, as its bundle will have them."""
    info, files = text_files.tokenizer_info(checkpoint, config, tokenizer)
    data = b"" if info.file is None else files[0][0].read_bytes()
    loaded = make_tokenizer(info, data, str(files[0][0]) if files else "")
    template = text_files.chat_template(checkpoint)
    return TextReader(loaded, None if template is None else ChatTemplate(template, loaded))


@dataclass(frozen=True)
class CalibrationText:
    """Token sequences to run through the model.

    Attributes:
        sequences: i64 [S, L]; each starts from an empty state.
        asked: requested number of sequences; a short file has fewer.
        file: name of the file.
        sha256: SHA-256 of the file.
        given: whether it was named, or is the greetings of the demonstration models.
    """

    sequences: NDArray[np.int64]
    asked: int
    file: str
    sha256: str
    given: bool = True

    def record(self) -> dict[str, Any]:
        """Describe the text, for the manifest."""
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
    """Read at most `count` sequences of `length` tokens, evenly spaced over the file.

    A `.jsonl` file has an object per line, with "messages" (role and content) or "text"; any other
    file is plain text. `path` None reads the greetings of the demonstration models.

    Raises ExportError, field `calibrate`, when the file is unreadable, empty, not UTF-8 (naming the
    byte), has a line of another form, or has fewer tokens than one sequence.
    """
    given, path = path is not None, path or GREETINGS
    if count < 1 or length < 1:
        raise ExportError(f"{count} sequences of {length} tokens are no text", field=_FIELD)
    try:
        with path.open("rb") as file:
            size, digest = _scan(file, path)
            source = TokenSource(file, path, reader)
            if size <= count * length * _BYTES_PER_TOKEN:
                rows = _read_all(source, count, length)
            else:
                rows = _read_samples(source, size, count, length)
    except OSError as problem:
        raise _error(path, f"cannot be read: {problem.strerror}", "name a readable file") from None
    return CalibrationText(np.array(rows, np.int64), count, path.name, digest, given)


def _error(path: Path, message: str, remedy: str) -> ExportError:
    return ExportError(message, file=path, field=_FIELD, remedy=remedy)


def _scan(file: BinaryIO, path: Path) -> tuple[int, str]:
    """Return the file's size and SHA-256, after checking that all of it is UTF-8."""
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    size = 0
    while True:
        block = file.read(_BLOCK)
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as problem:
            raise _error(
                path, f"is not UTF-8 at byte {size - pending + problem.start}", "save it as UTF-8"
            ) from None
        if not block:
            return size, digest.hexdigest()
        digest.update(block)
        size += len(block)


class TokenSource:
    """Pieces of an open file as token ids, from any byte."""

    def __init__(self, file: BinaryIO, path: Path, reader: TextReader) -> None:
        self.path = path
        self._file, self._reader = file, reader
        self._is_jsonl = path.suffix == ".jsonl"

    def pieces(self, start: int, wanted: int | None = None) -> Iterator[list[int]]:
        """Yield the ids of pieces that begin at or after byte `start`: lines, or blocks of text.

        Of a block, `wanted` ids are enough.
        """
        self._file.seek(max(0, start - 1))
        if start:
            # Skip to the next line, unless the byte before `start` ends one. Plain text without
            # line breaks is read from `start` itself.
            skipped = self._file.readline(_MAX_LINE if self._is_jsonl else _CHUNK)
            if not skipped.endswith(b"\n") and not self._is_jsonl:
                self._file.seek(start)
        return self._jsonl_pieces() if self._is_jsonl else self._text_pieces(wanted)

    def _text_pieces(self, wanted: int | None) -> Iterator[list[int]]:
        first = self._file.tell() == 0
        rest = b""
        while block := self._file.read(_CHUNK):
            text = rest + block
            cut = max(text.rfind(b"\n"), text.rfind(b" ")) + 1 or _last_character(text)
            text, rest = text[:cut], text[cut:]
            start = None if wanted is None else self._encode_start(text, first, wanted)
            yield start or self._encode(text, first)
            first = False
        if rest:
            yield self._encode(rest, first)

    def _encode(self, data: bytes, first: bool) -> list[int]:
        # Without line breaks a piece may begin inside a character, whose bytes are dropped.
        text = data.decode("utf-8", errors="ignore")
        return self._reader.document(text) if first else self._reader.tokenizer.encode(text)

    def _encode_start(self, data: bytes, first: bool, wanted: int) -> list[int] | None:
        """Return the first `wanted` ids of a piece, tokenizing only its beginning, or None if the
        rest of it could change them.
        """
        start = data[: _USUAL_BYTES_PER_TOKEN * wanted + _WORDS_BEHIND * _BYTES_PER_TOKEN]
        start = start[: max(start.rfind(b"\n"), start.rfind(b" ")) + 1]
        if len(start) == len(data) or not start:
            return None
        ids = self._encode(start, first)[:wanted]
        used = sum(len(self._reader.tokenizer.token_bytes(token)) for token in ids)
        enough = len(ids) == wanted and len(start[used:].split()) >= _WORDS_BEHIND
        return ids if enough else None

    def _jsonl_pieces(self) -> Iterator[list[int]]:
        offset = self._file.tell()
        while line := self._file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE:
                raise self._line_error(offset, f"is longer than {_MAX_LINE} bytes")
            if line.strip():
                yield self._line_ids(line, offset)
            offset += len(line)

    def _line_ids(self, line: bytes, offset: int) -> list[int]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise self._line_error(offset, f"is not JSON: {problem}") from None
        try:
            if isinstance(value, dict) and isinstance(value.get("text"), str):
                return self._reader.document(value["text"])
            return self._reader.conversation(
                [Message(str(m["role"]), str(m["content"])) for m in value["messages"]]
            )
        except (KeyError, TypeError):
            raise self._line_error(offset, 'has neither "messages" nor "text"') from None
        except EdgeError as problem:
            raise self._line_error(offset, f"cannot be tokenized: {problem}") from None

    def _line_error(self, offset: int, what: str) -> ExportError:
        return _error(
            self.path, f"the line at byte {offset} {what}",
            'give a line for each object, with "messages" or "text"',
        )  # fmt: skip


def _last_character(text: bytes) -> int:
    """Return where the last character begins, complete or not."""
    at = len(text) - 1
    while at > 0 and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _read_all(source: TokenSource, count: int, length: int) -> list[list[int]]:
    """Return `count` sequences, evenly spaced, of the file's tokens joined end to end."""
    ids = [token for piece in source.pieces(0) for token in piece]
    available = len(ids) // length
    if not ids:
        raise _error(source.path, "holds no text", "give a text of the kind the model is for")
    if not available:
        raise _error(
            source.path, f"has {len(ids)} tokens, too few for one sequence of {length}",
            "give more text, or ask for shorter sequences",
        )  # fmt: skip
    used = min(count, available)
    starts = [i * available // used * length for i in range(used)]
    return [ids[start : start + length] for start in starts]


def _read_samples(source: TokenSource, size: int, count: int, length: int) -> list[list[int]]:
    """Return a sequence from each of `count` places, except where the rest is too short."""
    rows = []
    for i in range(count):
        ids: list[int] = []
        for piece in source.pieces(i * size // count, length):
            ids += piece
            if len(ids) >= length:
                rows.append(ids[:length])
                break
    if not rows:
        raise _error(source.path, f"has no {length} tokens in a row", "give a text of another kind")
    return rows
