"""The wire format of protocol buffers, for the few fields read without the protobuf library."""

from __future__ import annotations

from collections.abc import Iterator

_MASK = (1 << 64) - 1
VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5


def _varint(data: bytes, at: int) -> tuple[int, int]:
    if at < len(data) and data[at] < 0x80:  # most have one byte
        return data[at], at + 1
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"ends inside a number at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK, at  # drop bits beyond 64, as libraries do
        shift += 7


def varints(data: bytes) -> list[int]:
    """Return the numbers that fill `data`. Raises ValueError when it ends inside one."""
    values, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        values.append(value)
    return values


def put_varint(value: int) -> bytes:
    """Encode a number that is not negative, 7 bits a byte, the lowest first: unsigned LEB128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield (field number, wire type, value). Raises ValueError when the message is malformed."""
    for number, wire, value, _ in placed_fields(data):
        yield number, wire, value


def placed_fields(data: bytes, at: int = 0) -> Iterator[tuple[int, int, int | bytes, int]]:
    """Yield `fields` from byte `at` on, each with the offset of the next field."""
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if not 0 < number < 1 << 29:
            raise ValueError(f"field {number} before byte {at}")
        value: int | bytes
        if wire == VARINT:
            value, at = _varint(data, at)
        else:
            if wire == BYTES:
                size, at = _varint(data, at)
            elif wire in (_FIXED64, _FIXED32):
                size = 8 if wire == _FIXED64 else 4
            else:
                raise ValueError(f"wire type {wire} at byte {at}")
            if size > len(data) - at:
                raise ValueError(f"field {number} of {size} bytes runs past the end")
            value, at = data[at : at + size], at + size
        yield number, wire, value, at


def put(number: int, wire: int, value: int | bytes) -> bytes:
    """Encode one field."""
    key = put_varint(number << 3 | wire)
    if isinstance(value, int):
        return key + put_varint(value)
    return key + (put_varint(len(value)) if wire == BYTES else b"") + value


def message(value: int | bytes) -> bytes:
    """Return a field that must be bytes: a message or text. Raises ValueError for a number."""
    if isinstance(value, int):
        raise ValueError("has a number where a message belongs")
    return value
