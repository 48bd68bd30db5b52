"""What one node of the TensorRT graph launches, in the bytes its plugin reads (`src/launches.h`).

A plugin knows nothing of its op: its node's attribute `launches` says which tensors it has, how
large its outputs and its workspace are, and which compiled kernels to launch on them for runs of
each size. Nodes of equal layers have equal bytes.

The bytes: MAGIC; a number n; n numbers; then the text that strings are cut from. A number is not
negative and is written as unsigned LEB128: seven bits a byte, the lowest first, the highest bit of
a byte set where another follows. (What ONNX calls a string may be handed over with a 0 behind it.)
A string is two numbers: its first byte in that text, its length. A `Size` is three: times, its
symbols as little-endian ASCII ("TB" is 0x4254), per. Lists are their length and their items:

    inputs      of (dtype, rank)
    outputs     of (dtype, alias + 1, dims: of (symbol, or 0; the number otherwise))
    symbols     of (symbol, input, axis): the length of that axis of that input
    rows        symbols whose product is the number of rows that programs are chosen by
    workspace   of (bytes of a row, most rows: 0 is any): buffers; see `WorkBuffer`
    kernels     of (string, threads of a block)
    launches    of (kernel, grid: 3 Size, arguments: of (tag, then by tag))
                    0 pointer   space (0 input, 1 output, 2 workspace), index, bytes from its start
                    1 i32       Size
                    2 f32       the bits of it
    programs    of (tree: 0 or 1, most rows: 0 is any, launches: of index)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from edge.launch import DType, Size

MAGIC = b"EDGEOP02"
DTYPES: tuple[DType, ...] = ("f32", "f16", "i8", "u8", "i32", "i64")
SPACES = ("input", "output", "workspace")

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Input:
    """A tensor the node reads. u8 is told to TensorRT as int8, of which it passes the bits on."""

    dtype: DType
    rank: int


@dataclass(frozen=True)
class Output:
    """A tensor the node yields.

    Attributes:
        dims: a number, or a symbol: T, B, L, C, S, A.
        alias: the input whose memory it is, written in place; -1: it has its own.
    """

    dtype: DType
    dims: tuple[int | str, ...]
    alias: int = -1


@dataclass(frozen=True)
class Place:
    """A pointer: `at` bytes behind the start of an input, an output or a workspace buffer."""

    space: Literal["input", "output", "workspace"]
    index: int
    at: int = 0


@dataclass(frozen=True)
class WorkBuffer:
    """Part of the workspace: `rows` rows of `row_bytes`, on 256 bytes, behind the one before.

    Runs of more than `max_rows` rows (None: any number) have no use for it: there it takes nothing.
    """

    row_bytes: int
    max_rows: int | None


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: `Variant.key`, and the threads of one block."""

    key: str
    threads: int


@dataclass(frozen=True)
class Call:
    """One launch: index of its kernel; a grid dimension that comes out as 0 counts as 1."""

    kernel: int
    grid: tuple[Size, Size, Size]
    arguments: tuple[Place | Size | float, ...]


@dataclass(frozen=True)
class NodeProgram:
    """The calls for runs of up to `max_rows` rows (None: any number), for trees or for chains.

    The first that fits is used; where a node has some for trees, a tree takes one of those alone.
    A node that does the same for both has none for trees.
    """

    tree: bool
    max_rows: int | None
    calls: tuple[int, ...]


@dataclass(frozen=True)
class NodeLaunches:
    """See the module. `symbols`: name → (input, axis). A run is a tree where A is more than 1."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    symbols: dict[str, tuple[int, int]]
    rows: str
    workspace: tuple[WorkBuffer, ...]
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    programs: tuple[NodeProgram, ...]

    def encode(self) -> bytes:
        """The one byte form."""
        to = _Writer()
        to.list(self.inputs, lambda one: to.words(DTYPES.index(one.dtype), one.rank))
        to.list(self.outputs, to.output)
        to.list(sorted(self.symbols.items()), lambda one: to.words(_ascii(one[0]), *one[1]))
        to.words(_ascii(self.rows))
        to.list(self.workspace, to.buffer)
        to.list(self.kernels, to.kernel)
        to.list(self.calls, to.call)
        to.list(self.programs, to.program)
        return to.bytes()


def _ascii(symbols: str) -> int:
    return int.from_bytes(symbols.encode("ascii"), "little")


def _leb128(value: int) -> bytes:
    """`value` ≥ 0, as DWARF 5, appendix C, writes it."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


class _Writer:
    def __init__(self) -> None:
        self._count = 0
        self._words = bytearray()
        self._text = b""

    def words(self, *values: int) -> None:
        for value in values:
            self._words += _leb128(value)
        self._count += len(values)

    def list(self, items: Iterable[_Item], write: Callable[[_Item], None]) -> None:
        found = tuple(items)
        self.words(len(found))
        for item in found:
            write(item)

    def output(self, output: Output) -> None:
        self.words(DTYPES.index(output.dtype), output.alias + 1)
        self.list(output.dims, self._dim)

    def _dim(self, dim: int | str) -> None:
        self.words(*((_ascii(dim), 0) if isinstance(dim, str) else (0, dim)))

    def _size(self, size: Size) -> None:
        self.words(size.times, _ascii(size.of), size.per)

    def buffer(self, buffer: WorkBuffer) -> None:
        self.words(buffer.row_bytes, buffer.max_rows or 0)

    def kernel(self, kernel: Kernel) -> None:
        data = kernel.key.encode()
        self.words(len(self._text), len(data), kernel.threads)
        self._text += data

    def call(self, call: Call) -> None:
        self.words(call.kernel)
        for size in call.grid:
            self._size(size)
        self.list(call.arguments, self._argument)

    def _argument(self, argument: Place | Size | float) -> None:
        if isinstance(argument, Place):
            self.words(0, SPACES.index(argument.space), argument.index, argument.at)
        elif isinstance(argument, Size):
            self.words(1)
            self._size(argument)
        else:
            self.words(2, int.from_bytes(struct.pack("<f", argument), "little"))

    def program(self, program: NodeProgram) -> None:
        self.words(int(program.tree), program.max_rows or 0)
        self.list(program.calls, lambda index: self.words(index))

    def bytes(self) -> bytes:
        return MAGIC + _leb128(self._count) + self._words + self._text
