"""Read the header of an untrusted GGUF file: its metadata and the place of each tensor.

Layout: github.com/ggml-org/ggml, docs/gguf.md. The `gguf` package's reader is not used, because it
trusts a file's lengths and counts and loops over them without checking the file's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edge.errors import CheckpointError, Faults

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME = 1 << 12
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 31
DOWNLOAD = "download the file again"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place.

    Attributes:
        shape: shape in PyTorch's order, the reverse of the file's.
        kind: number of its ggml type.
        offset: offset of its bytes in the file.
        size: number of bytes.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """A file's metadata and tensors.

    Attributes:
        metadata: key → number, string, boolean, or list of these.
        tensors: name → place, checked to be inside the file.
    """

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(file: Path, data: mmap.mmap, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
    """Parse the header of a mapped file.

    `sizes` maps the number of a ggml type to (values per block, bytes per block). Raises
    CheckpointError when the file is not GGUF, has another version or byte order, is cut short or
    malformed, or has tensors of an unknown type or outside the file, listing all such tensors.
    """
    return _Reader(file, data).read(sizes)


class _Reader:
    """A position in the file. Lengths and counts are checked against the bytes that are left."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._offset = file, data, 0

    def read(self, sizes: dict[int, tuple[int, int]]) -> GgufHeader:
        if self._read_bytes(4, "its magic number") != MAGIC:
            self._refuse("does not begin with GGUF", "give a .gguf file")
        version = self._number("I", "its version")
        if version & 0xFFFF == 0:
            self._refuse("is written for a big-endian machine", "convert it: gguf-convert-endian")
        if version not in VERSIONS:
            self._refuse(f"is of version {version}; 2 and 3 are known", "convert it again")
        tensors = self._count("tensors", 24, MAX_TENSORS)
        keys = self._count("metadata keys", 13, MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._name("a metadata key")
            if key in metadata:
                self._refuse("appears twice", DOWNLOAD, key)
            metadata[key] = self._value(self._number("I", key), key)
        places = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"is {alignment!r:.40}, not a power of two", DOWNLOAD, _ALIGNMENT)
        start = self._offset + -self._offset % alignment
        return GgufHeader(metadata, self._check(places, start, alignment, sizes))

    def _refuse(self, message: str, remedy: str, field: str | None = None) -> NoReturn:
        raise CheckpointError(message, file=self._file, field=field, remedy=remedy)

    def _read_bytes(self, size: int, what: str) -> bytes:
        remaining = len(self._data) - self._offset
        if size > remaining:
            self._refuse(f"is cut short: {what} needs {size} bytes, {remaining} are left", DOWNLOAD)
        self._offset += size
        return self._data[self._offset - size : self._offset]

    def _number(self, kind: str, what: str) -> int:
        return int(struct.unpack(f"<{kind}", self._read_bytes(struct.calcsize(kind), what))[0])

    def _count(self, what: str, item_bytes: int, maximum: int) -> int:
        """Read a count of items that take at least `item_bytes` bytes each."""
        count = self._number("Q", f"the number of {what}")
        if count > maximum or count * item_bytes > len(self._data) - self._offset:
            self._refuse(f"claims {count} {what}, more than it can hold", DOWNLOAD)
        return count

    def _text(self, what: str, maximum: int | None = None) -> str:
        size = self._number("Q", what)
        if maximum is not None and size > maximum:
            self._refuse(f"{what} has {size} bytes, at most {maximum} allowed", DOWNLOAD)
        raw = self._read_bytes(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as problem:
            self._refuse(f"{what} is not UTF-8: {problem.reason}", DOWNLOAD)

    def _name(self, what: str) -> str:
        return self._text(what, MAX_NAME)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self._refuse(f"is of the unknown type {kind}", "convert the model again", key)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I", key), self._number("Q", key)
        if kind == _STRING:
            if count * 8 > len(self._data) - self._offset:
                self._refuse(f"claims {count} texts, more than the file can hold", DOWNLOAD, key)
            return [self._text(key) for _ in range(count)]
        if kind not in _SCALARS:
            self._refuse(f"is a list of the unknown type {kind}", "convert the model again", key)
        return self._scalars(kind, count, key)

    def _scalars(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self._read_bytes(count * dtype.itemsize, key), dtype)
        return (values != 0).tolist() if kind == _BOOL else values.tolist()

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type and offset, unchecked."""
        name = self._name("a tensor's name")
        count = self._number("I", name)
        if not 1 <= count <= MAX_DIMENSIONS:
            self._refuse(f"has {count} dimensions, 1 to {MAX_DIMENSIONS} are known", DOWNLOAD, name)
        shape = tuple(self._number("Q", name) for _ in range(count))
        return name, shape[::-1], self._number("I", name), self._number("Q", name)

    def _check(
        self,
        places: list[tuple[str, tuple[int, ...], int, int]],
        start: int,
        alignment: int,
        sizes: dict[int, tuple[int, int]],
    ) -> dict[str, GgufTensor]:
        faults, tensors = Faults(), {}
        for name, shape, kind, offset in places:
            block, size = sizes.get(kind, (0, 0))
            if name in tensors:
                faults.add(name, "appears twice", DOWNLOAD)
            elif not all(1 <= n <= MAX_DIMENSION for n in shape):
                faults.add(name, f"has the shape {list(shape)}", DOWNLOAD)
            elif not block:
                faults.add(name, f"is of the unknown type {kind}", "update the package gguf")
            elif shape[-1] % block:
                faults.add(name, f"has rows of {shape[-1]}, not whole blocks of {block}", DOWNLOAD)
            elif offset % alignment:
                faults.add(name, f"begins at {offset}, not a multiple of {alignment}", DOWNLOAD)
            else:
                size = math.prod(shape) // block * size
                if start + offset + size > len(self._data):
                    end, length = start + offset + size, len(self._data)
                    faults.add(name, f"ends at byte {end}, but the file at {length}", DOWNLOAD)
                else:
                    tensors[name] = GgufTensor(shape, kind, start + offset, size)
        faults.refuse(CheckpointError, file=self._file)
        return tensors
