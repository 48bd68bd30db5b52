"""SentencePiece `.model` files.

Models mark chat roles as user-defined symbols, which the library matches anywhere in a text. Here
they are turned into control symbols before the model is loaded. Control symbols are kept in a table
that encoding never reads (model_interface.cc, `reserved_id_map_`), so no typed text yields them.

The file is one protocol buffer message, `ModelProto` of sentencepiece_model.proto: field 1 is a
piece (1 text, 2 score, 3 type), field 2 the trainer's settings, field 3 the normalizer's
(2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces), field 4 samples that the
library encodes while it loads the file. It is parsed here because the library's own
`sentencepiece_model_pb2` requires the exact release of protobuf that it was generated for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from edge.errors import InputError, TokenizerError
from edge.protobuf import BYTES, VARINT, fields, message, placed_fields, put
from edge.text.hf_checks import MAX_GROWN, LengthGrowth, charsmap_growth
from edge.text.specials import SpecialToken, check_specials
from edge.text.tokenizer import (
    MAX_FILE,
    MAX_PIECE,
    Tokenizer,
    unknown_character,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"  # how pieces write a space
BYTE_NAME = re.compile(r"<0x[0-9A-F]{2}>")
# wire keys of a piece, and of the text, score and type in it
_PIECE, _TEXT, _SCORE, _KIND = 0x0A, 0x0A, 0x15, 0x18
REMEDY = "export the model again from an intact checkpoint"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, BPE or unigram.

    Special tokens are control symbols, `bos`, `eos`, `pad`, and every user-defined symbol with a
    visible character (white space, which models often define, stays text). Of these, answers show
    only user-defined symbols that are not spelled `<|…|>`.
    """

    kind = "sentencepiece"

    def __init__(
        self,
        data: bytes,
        *,
        file: str = "tokenizer.model",
        bos: int | None = None,
        eos: tuple[int, ...] = (),
        pad: int | None = None,
        add_bos: bool = False,
    ) -> None:
        """Raises TokenizerError when `data` is malformed or too large."""
        if len(data) > MAX_FILE:
            raise TokenizerError(f"has {len(data)} bytes, at most {MAX_FILE} allowed", file=file)
        try:
            model = read_model(data)
        except ValueError as problem:
            raise TokenizerError(
                f"is not a SentencePiece model: {problem}", file=file, remedy=REMEDY
            ) from None
        self._file, self._pieces = file, model.pieces
        # a character without a piece becomes up to four bytes, which are tokens
        self._growth = LengthGrowth(model.growth, 4)
        self._safe_length = self._growth.safe_length
        _check_pieces(self._pieces, file)
        self.vocab_size = len(self._pieces)
        self.bos, self.eos, self.pad, self.add_bos = bos, eos, pad, add_bos
        self.fingerprint = hashlib.sha256(b"sentencepiece\0" + data).hexdigest()
        configured = {token for token in (bos, pad, *eos) if token is not None}
        ids = [i for i, piece in enumerate(self._pieces) if i in configured or _is_special(piece)]
        self.specials = tuple(SpecialToken(self._pieces[i].text, i) for i in ids)
        check_specials(self.specials, file, REMEDY)
        # a model that trims spaces adds its prefix after trimming, which would remove one from here
        self._adds_prefix = model.add_dummy_prefix and not model.remove_extra_whitespaces
        self.strips_space = model.add_dummy_prefix
        self._bytes = [
            b"" if _is_hidden(piece, i in configured) else _piece_bytes(piece)
            for i, piece in enumerate(self._pieces)
        ]
        self._byte_ids = {
            value[0]: i
            for i, (piece, value) in enumerate(zip(self._pieces, self._bytes, strict=True))
            if piece.kind == BYTE and value
        }
        control = frozenset(i for i in ids if self._pieces[i].kind == USER_DEFINED)
        rewritten = rewrite_model(
            data, model.starts, control=control, no_dummy_prefix=self._adds_prefix
        )
        self._processor = _load(rewritten, file)

    @cached_property
    def longest_piece(self) -> int:
        return max(len(value) for value in self._bytes)

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        if first and self._adds_prefix:
            text = " " + text
        if SPACE not in text or len(self._byte_ids) < 256:
            return self._encode_run(text)
        # the library cannot tell this character from a space, so its bytes are encoded
        literal = [self._byte_ids[value] for value in SPACE.encode()]
        ids: list[int] = []
        for index, part in enumerate(text.split(SPACE)):
            ids += literal if index else []
            ids += self._encode_run(part) if part else []
        return ids

    def _encode_run(self, text: str) -> list[int]:
        try:
            if len(text) > self._safe_length:
                self._growth.check(text, self._processor.normalize)
            ids: list[int] = self._processor.encode(text)
        except (KeyboardInterrupt, SystemExit, InputError):
            raise
        except BaseException as problem:  # as in HfTokenizer, whatever a native library raises
            raise TokenizerError(
                f"cannot encode a text: {type(problem).__name__}: {problem}"[:500],
                file=self._file,
                remedy="use a model with another tokenizer",
            ) from None
        if not self.special_ids.isdisjoint(ids):
            # only if the unknown symbol is also the one that begins or ends texts
            raise unknown_character()
        return ids

    def token_bytes(self, token: int) -> bytes:
        # called for every token of an answer: an id in range does not pay for another call
        return self._bytes[token if 0 <= token < self.vocab_size else self.check_id(token)]

    def id_to_piece(self, token: int) -> str:
        return self._pieces[self.check_id(token)].text


def _is_special(piece: SpmPiece) -> bool:
    if piece.kind == USER_DEFINED:
        return bool(piece.text.replace(SPACE, " ").strip())
    return piece.kind == CONTROL


def _is_hidden(piece: SpmPiece, configured: bool) -> bool:
    if piece.kind == USER_DEFINED:
        return configured or (piece.text.startswith("<|") and piece.text.endswith("|>"))
    return configured or piece.kind == CONTROL


def _piece_bytes(piece: SpmPiece) -> bytes:
    if piece.kind == UNKNOWN:
        return "\ufffd".encode()
    if piece.kind == BYTE:
        return bytes((int(piece.text[3:5], 16),))
    return piece.text.replace(SPACE, " ").encode()


def _check_pieces(pieces: tuple[SpmPiece, ...], file: str) -> None:
    if not pieces:
        raise TokenizerError("has no pieces", file=file, remedy=REMEDY)
    for index, piece in enumerate(pieces):
        if not piece.text or len(piece.text) > MAX_PIECE:
            raise TokenizerError(
                f"has {len(piece.text)} characters, 1 to {MAX_PIECE} allowed",
                file=file,
                field=f"pieces.{index}",
                remedy=REMEDY,
            )
        if piece.kind == BYTE and not BYTE_NAME.fullmatch(piece.text):
            raise TokenizerError(
                f"{piece.text!r} does not name a byte", file=file, field=f"pieces.{index}"
            )


def _load(data: bytes, file: str) -> Any:
    # imported on demand: a bundle with another tokenizer must not pay for it
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor()
        processor.LoadFromSerializedProto(data)
    except (RuntimeError, OSError) as problem:
        raise TokenizerError(
            f"is not a SentencePiece model: {problem}", file=file, remedy=REMEDY
        ) from None
    return processor


# -- the file --------------------------------------------------------------------------------------


class SpmPiece(NamedTuple):
    """One entry of the vocabulary; its id is its index."""

    text: str
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """The pieces by id, and what the normalizer does.

    Attributes:
        starts: offset of each piece's field in the file.
        growth: maximum factor by which the normalizer's table lengthens a text.
    """

    pieces: tuple[SpmPiece, ...]
    starts: list[int]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    growth: int


def _piece(data: bytes) -> SpmPiece:
    text, kind = b"", NORMAL
    for number, _, value in fields(data):
        if number == 1:
            text = message(value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return SpmPiece(text.decode("utf-8"), kind)


def _short_pieces(data: bytes) -> tuple[list[SpmPiece], list[int], int]:
    """Read pieces from the beginning of the file. Return them, their offsets and where they end.

    A fast path for pieces as the library writes them: text, score, and the type if it is not
    `NORMAL`, in less than 128 bytes. There are tens of thousands; reading them with `fields` would
    take half of the TTFT.
    """
    pieces, starts, at = [], [], 0
    while at + 2 <= len(data) and data[at] == _PIECE and (size := data[at + 1]) < 0x80:
        end = at + 2 + size
        if size < 7 or end > len(data) or data[at + 2] != _TEXT:
            break
        score, kind = at + 4 + data[at + 3], NORMAL
        if score + 7 == end and data[score + 5] == _KIND:
            kind = data[score + 6]
        elif score + 5 != end:
            break
        if data[score] != _SCORE or kind > 0x7F:
            break
        pieces.append(SpmPiece(data[at + 4 : score].decode("utf-8"), kind))
        starts.append(at)
        at = end
    return pieces, starts, at


def read_model(data: bytes) -> SpmModel:
    """Parse a `.model`. Raises ValueError (UnicodeDecodeError included) when it is malformed."""
    pieces, starts, at = _short_pieces(data)
    add_dummy_prefix = remove_extra_whitespaces = True  # the defaults of the .proto
    charsmap, samples = b"", 0
    for number, _, value, end in placed_fields(data, at):
        if number == 1:
            pieces.append(_piece(message(value)))
            starts.append(at)
        elif number == 3:
            for inner, _, setting in fields(message(value)):
                if inner == 2:
                    charsmap = message(setting)
                elif inner == 3:
                    add_dummy_prefix = bool(setting)
                elif inner == 4:
                    remove_extra_whitespaces = bool(setting)
        elif number == 4:
            samples += len(message(value))
        at = end
    growth = charsmap_growth(charsmap)
    if samples * growth > MAX_GROWN:
        raise ValueError(f"samples of {samples} bytes, which it can expand {growth} times")
    return SpmModel(tuple(pieces), starts, add_dummy_prefix, remove_extra_whitespaces, growth)


def rewrite_model(
    data: bytes, starts: Sequence[int], *, control: frozenset[int], no_dummy_prefix: bool
) -> bytes:
    """Return the model with the pieces `control` as control symbols, which text never yields.

    `starts` come from `read_model`. The last of repeated fields counts, so changes are appended.
    """
    out, done = bytearray(), 0
    for start in (starts[index] for index in sorted(control)):
        _, _, piece, end = next(placed_fields(data, start))
        out += data[done:start] + put(1, BYTES, message(piece) + put(3, VARINT, CONTROL))
        done = end
    out += data[done:]
    if no_dummy_prefix:
        out += put(3, BYTES, put(3, VARINT, 0))
    return bytes(out)
