"""Read a kernel's resource usage from its cubin, without NVIDIA's tools.

A cubin is an ELF file. Its sections `.nv.info` and `.nv.info.<kernel>` are lists of attributes:
format u8, number u8, then u16, which is the value itself or the size of the data that follows.
Numbers and layouts are those that `cuobjdump -elf` prints (EIATTR_…); the tests compare with it
where it is installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from edge.errors import ExportError

_SIZED = 4
_FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT = 0x11, 0x12, 0x2F
_REQNTID, _KPARAM_INFO = 0x10, 0x17
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL_BYTES = 24


@dataclass(frozen=True)
class Resources:
    """Resource usage of a kernel.

    Attributes:
        registers: registers per thread.
        local_bytes: stack per thread, which includes spilled registers.
        threads: threads per block that the kernel must be launched with.
        parameters: number of parameters.
    """

    registers: int
    local_bytes: int
    threads: int
    parameters: int


def resources(cubin: bytes, symbol: str) -> Resources:
    """Read the attributes of the kernel `symbol`. Raises ExportError when the cubin lacks them."""
    try:
        sections = _sections(cubin)
        number = _symbol_number(sections, symbol)
        common = [
            (kind, struct.unpack("<II", data))
            for kind, data in _attributes(sections[".nv.info"])
            if kind in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGCOUNT)
        ]
        attributes = list(_attributes(sections[f".nv.info.{symbol}"]))
        values = {kind: value for kind, (owner, value) in common if owner == number}
        shape = next(data for kind, data in attributes if kind == _REQNTID)
        x, y, z = struct.unpack("<III", shape)
        return Resources(
            registers=values[_REGCOUNT],
            local_bytes=max(values.get(_FRAME_SIZE, 0), values.get(_MIN_STACK_SIZE, 0)),
            threads=x * y * z,
            parameters=sum(kind == _KPARAM_INFO for kind, _ in attributes),
        )
    except (struct.error, KeyError, IndexError, StopIteration, ValueError) as problem:
        raise ExportError(
            f"cannot read the cubin that ptxas made: {problem!r}",
            field=symbol,
            remedy="use the Triton version in constraints.txt",
        ) from None


def _sections(elf: bytes) -> dict[str, bytes]:
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [_SECTION.unpack_from(elf, table + i * size) for i in range(count)]
    base = headers[names][4]
    sections = {}
    for name, kind, _, _, offset, length, *_ in headers:
        end = elf.index(b"\0", base + name)
        nobits = kind == 8
        sections[elf[base + name : end].decode()] = b"" if nobits else elf[offset : offset + length]
    return sections


def _symbol_number(sections: dict[str, bytes], symbol: str) -> int:
    table, names = sections[".symtab"], sections[".strtab"]
    for number in range(len(table) // _SYMBOL_BYTES):
        (name,) = struct.unpack_from("<I", table, number * _SYMBOL_BYTES)
        if names[name : names.index(b"\0", name)].decode() == symbol:
            return number
    raise ValueError(f"it has no symbol {symbol!r}")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, kind, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + value]
            at += value
