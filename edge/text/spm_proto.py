"""The few fields of a SentencePiece `.model` that its Python library does not tell.

The file is one protocol buffer message, `ModelProto` of sentencepiece_model.proto: field 1 is a
piece (1 text, 2 score, 3 type), field 2 the trainer's settings, field 3 the normalizer's
(3 add_dummy_prefix, 4 remove_extra_whitespaces). Everything else is carried along as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


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


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"ends inside a number at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _put_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(field number, wire type, value) of every field; ValueError where the message is cut."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == _VARINT:
            value, at = _varint(data, at)
        else:
            if wire == _BYTES:
                size, at = _varint(data, at)
            elif wire in (_FIXED64, _FIXED32):
                size = 8 if wire == _FIXED64 else 4
            else:
                raise ValueError(f"wire type {wire} at byte {at}")
            if number == 0 or size > len(data) - at:
                raise ValueError(f"field {number} of {size} bytes runs past the end")
            value, at = data[at : at + size], at + size
        yield number, wire, value


def _put(number: int, wire: int, value: int | bytes) -> bytes:
    key = _put_varint(number << 3 | wire)
    if isinstance(value, int):
        return key + _put_varint(value)
    return key + (_put_varint(len(value)) if wire == _BYTES else b"") + value


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("has a number where a message belongs")
    return value


def _piece(data: bytes) -> Piece:
    text, kind = b"", NORMAL
    for number, _, value in _fields(data):
        if number == 1:
            text = _message(value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text.decode("utf-8"), kind)


def read_model(data: bytes) -> SpmModel:
    """Parse a `.model`. Raises ValueError (UnicodeDecodeError included) when it is malformed."""
    pieces: list[Piece] = []
    add_dummy_prefix = remove_extra_whitespaces = True  # the defaults of the .proto
    for number, _, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 3:
            for inner, _, setting in _fields(_message(value)):
                if inner == 3:
                    add_dummy_prefix = bool(setting)
                elif inner == 4:
                    remove_extra_whitespaces = bool(setting)
    return SpmModel(tuple(pieces), add_dummy_prefix, remove_extra_whitespaces)


def rewrite_model(data: bytes, *, control: frozenset[int], no_dummy_prefix: bool) -> bytes:
    """The same model with the pieces `control` made control symbols, which text never yields."""
    out, index = bytearray(), 0
    for number, wire, value in _fields(data):
        if number == 1:
            if index in control:
                kept = [f for f in _fields(_message(value)) if f[0] != 3]
                value = b"".join(_put(*field) for field in [*kept, (3, _VARINT, CONTROL)])
            index += 1
        elif number == 3 and no_dummy_prefix:
            kept = [f for f in _fields(_message(value)) if f[0] != 3]
            value = b"".join(_put(*field) for field in [*kept, (3, _VARINT, 0)])
        out += _put(number, wire, value)
    return bytes(out)
