"""Compiled kernels of one architecture in one piece, which an engine carries once.

The bytes: MAGIC; an int64, CRC-32 of all that follows, by which damage is found; 32 bytes, SHA-256
of the rest, which names it; an int64 n and n little-endian int64 words: the SM, the number of
kernels, and of each: key (start, length), symbol (start, length), cubin (start, length), dynamic
shared bytes, hidden trailing pointers; then what starts are counted in.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Mapping

from edge.launch import CompiledKernel

MAGIC = b"EDGEKRN2"
_NAME = len(MAGIC) + 8
HEADER = _NAME + 32


def pack(sm: int, kernels: Mapping[str, tuple[CompiledKernel, bytes]]) -> bytes:
    """`kernels` by `Variant.key`: what is known of each, and its cubin. Equal cubins are kept once.

    The same kernels give the same bytes.
    """
    words = [sm, len(kernels)]
    data = bytearray()
    placed: dict[bytes, int] = {}

    def place(piece: bytes) -> tuple[int, int]:
        if piece not in placed:
            # a cubin is an ELF file, which drivers map: eight bytes are what it asks for
            data.extend(bytes(-len(data) % 8))
            placed[piece] = len(data)
            data.extend(piece)
        return placed[piece], len(piece)

    for key, (compiled, cubin) in sorted(kernels.items()):
        words += [*place(key.encode()), *place(compiled.symbol.encode()), *place(cubin)]
        words += [compiled.shared_bytes, compiled.scratch]
    body = struct.pack(f"<{len(words) + 1}q", len(words), *words) + bytes(data)
    return sealed(body)


def sealed(body: bytes) -> bytes:
    """The bytes with what goes before them."""
    named = hashlib.sha256(body).digest() + body
    return MAGIC + struct.pack("<q", zlib.crc32(named)) + named


def identity(blob: bytes) -> str:
    """Names the kernels: equal blobs, and only those, have equal names."""
    return blob[_NAME:HEADER].hex()
