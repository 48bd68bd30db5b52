"""A blob of the compiled kernels of one architecture, which an engine contains once.

Format, little-endian:

    MAGIC
    int64       CRC-32 of everything that follows, to detect damage
    32 bytes    SHA-256 of the rest, the blob's identity
    int64       n
    n int64     SM, number of kernels; per kernel: key (start, length), symbol (start, length),
                cubin (start, length), dynamic shared bytes, number of hidden trailing pointers
    bytes       keys, symbols and cubins; starts are offsets from here
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
    """Pack `kernels`, by `Variant.key`, into a blob. Equal cubins are stored once.

    The same kernels give the same bytes.
    """
    words = [sm, len(kernels)]
    data = bytearray()
    placed: dict[bytes, int] = {}

    def place(piece: bytes) -> tuple[int, int]:
        if piece not in placed:
            # drivers map cubins, which are ELF files with an alignment of eight bytes
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
    """Prepend the magic, CRC-32 and SHA-256 to the body."""
    hashed = hashlib.sha256(body).digest() + body
    return MAGIC + struct.pack("<q", zlib.crc32(hashed)) + hashed


def identity(blob: bytes) -> str:
    """Return the identity of a blob's kernels. Only equal blobs have equal identities."""
    return blob[_NAME:HEADER].hex()
