"""Mutations of small files, as from a cosmic ray, a cut cable or a fuzzer."""

from __future__ import annotations

import random

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
