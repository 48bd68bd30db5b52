"""The few fields of a SentencePiece `.model` that its Python library does not tell.

The file is one protocol buffer message, `ModelProto` of sentencepiece_model.proto: field 1 is a
piece (1 text, 2 score, 3 type), field 2 the trainer's settings, field 3 the normalizer's
(3 add_dummy_prefix, 4 remove_extra_whitespaces). Everything else is carried along as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge.protobuf import VARINT, fields, message, put

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """What was read: pieces by id, and whether the normalizer adds or removes spaces."""

    pieces: tuple[Piece, ...]
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def _piece(data: bytes) -> Piece:
    text, kind = b"", NORMAL
    for number, _, value in fields(data):
        if number == 1:
            text = message(value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text.decode("utf-8"), kind)


def read_model(data: bytes) -> SpmModel:
    """Parse a `.model`. Raises ValueError (UnicodeDecodeError included) when it is malformed."""
    pieces: list[Piece] = []
    add_dummy_prefix = remove_extra_whitespaces = True  # the defaults of the .proto
    for number, _, value in fields(data):
        if number == 1:
            pieces.append(_piece(message(value)))
        elif number == 3:
            for inner, _, setting in fields(message(value)):
                if inner == 3:
                    add_dummy_prefix = bool(setting)
                elif inner == 4:
                    remove_extra_whitespaces = bool(setting)
    return SpmModel(tuple(pieces), add_dummy_prefix, remove_extra_whitespaces)


def rewrite_model(data: bytes, *, control: frozenset[int], no_dummy_prefix: bool) -> bytes:
    """The same model with the pieces `control` made control symbols, which text never yields."""
    out, index = bytearray(), 0
    for number, wire, value in fields(data):
        if number == 1:
            if index in control:
                kept = [f for f in fields(message(value)) if f[0] != 3]
                value = b"".join(put(*field) for field in [*kept, (3, VARINT, CONTROL)])
            index += 1
        elif number == 3 and no_dummy_prefix:
            kept = [f for f in fields(message(value)) if f[0] != 3]
            value = b"".join(put(*field) for field in [*kept, (3, VARINT, 0)])
        out += put(number, wire, value)
    return bytes(out)
