"""Mutations of small files, as from a cosmic ray, a cut cable or a fuzzer."""

from __future__ import annotations

import random
import re

_NUMBERS = (b"0", b"-1", b"255", b"65536", b"2147483648", b"18446744073709551615", b"1e999", b"-0")
_PIECES = (b"{", b"}", b"[", b"]", b'"', b":", b",", b"\x00", b"\xff", b"null", b"true", b"\\u0000")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Apply one to four changes: bits, bytes, cuts, repeats, numbers and punctuation."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not out:
            return b"\x00"
        at = rng.randrange(len(out))
        kind = rng.randrange(7)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 3:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        elif kind == 4:
            out[at : at + rng.randint(0, 3)] = rng.choice(_NUMBERS)
        elif kind == 5:
            out[at:at] = rng.choice(_PIECES)
        else:
            del out[at:]
    return bytes(out)


MAX_ENLARGED = 1 << 20  # bytes
_CLOSING = {ord("{"): ord("}"), ord("["): ord("]"), ord("("): ord(")")}


def enlarged(data: bytes, rng: random.Random) -> bytes:
    """Repeat a part up to 10,000 times, nest a part in itself, or enlarge a number."""
    if not data:
        return data
    kind, times = rng.randrange(3), int(10 ** rng.uniform(0.5, 4))
    if kind == 0:
        at = rng.randrange(len(data))
        part = data[at : at + int(2 ** rng.uniform(0, 9))]
        return data[:at] + part * _at_most(times, part, data) + data[at:]
    if kind == 1:
        return _nested(data, times, rng)
    numbers = [*re.finditer(rb"\d+", data)]
    if not numbers:
        return data
    number = rng.choice(numbers)
    digits = rng.choice((b"0" * min(times, 20), b"9" * min(times, 4000), b"00"))
    return data[: number.end()] + digits + data[number.end() :]


def _nested(data: bytes, times: int, rng: random.Random) -> bytes:
    """Put a part in brackets into itself, in place of one of its own parts."""
    places = [match.start() for match in re.finditer(rb"[{\[(]", data)]
    if not places:
        return data
    begin = rng.choice(places)
    end = _closing(data, begin)
    at = rng.choice([place for place in places if begin < place < end] or [begin + 1])
    after = min(_closing(data, at), end)
    left, right = data[begin:at], data[after:end]
    times = _at_most(times, left + right, data)
    return data[:begin] + left * times + data[at:after] + right * times + data[end:]


def _closing(data: bytes, begin: int) -> int:
    """Return the place after the bracket that closes the one at `begin`, or the end of the data."""
    if begin >= len(data) or data[begin] not in _CLOSING:
        return begin
    opening, closing, depth = data[begin], _CLOSING[data[begin]], 0
    for at in range(begin, len(data)):
        depth += (data[at] == opening) - (data[at] == closing)
        if depth == 0:
            return at + 1
    return len(data)


def _at_most(times: int, part: bytes, data: bytes) -> int:
    return max(1, min(times, (MAX_ENLARGED - len(data)) // max(1, len(part))))
