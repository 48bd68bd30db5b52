"""The launches of one node of the TensorRT graph, as the bytes its plugin reads (`src/launches.h`).

Plugins are independent of their op: the node's attribute `launches` lists its tensors, the sizes of
its outputs and workspace, and the compiled kernels to launch on them for runs of each size. Nodes
of equal layers have equal bytes.

Format: MAGIC; a number n; n numbers; then the text that strings point into. Numbers are not
negative and encoded as unsigned LEB128, as in DWARF 5, appendix C: seven bits a byte, the lowest
first, the highest bit set in all bytes but the last. (A 0 may follow the attribute, which ONNX
treats as a string.) A string is two numbers: its start in the text, its length. A `Size` is three:
times, its symbols as little-endian ASCII ("TB" is 0x4254), per. A list is its length and its items:

    inputs      list of (dtype, rank)
    outputs     list of (dtype, alias + 1, dims: list of (symbol, 0) or (0, number))
    symbols     list of (symbol, input, axis): the symbol is the length of that axis
    rows        symbols whose product is the number of rows that selects the program
    workspace   list of (bytes per row, max_rows or 0 for any): see `WorkBuffer`
    kernels     list of (string, threads per block)
    launches    list of (kernel, grid: 3 Size, arguments: list of (tag, then depending on the tag))
                    0 pointer   space (0 input, 1 output, 2 workspace), index, offset in bytes
                    1 i32       Size
                    2 f32       its bits
    programs    list of (tree: 0 or 1, max_rows or 0 for any, launches: list of index)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from edge.launch import DType, Size
from edge.protobuf import put_varint

MAGIC = b"EDGEOP02"
DTYPES: tuple[DType, ...] = ("f32", "f16", "i8", "u8", "i32", "i64")
SPACES = ("input", "output", "workspace")

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Input:
    """A tensor the node reads. TensorRT handles u8 as int8, with the same bits."""

    dtype: DType
    rank: int


@dataclass(frozen=True)
class Output:
    """A tensor the node writes.

    Attributes:
        dims: dimensions, each a number or a symbol: T, B, L, C, S, A.
        alias: index of the input whose memory is updated in place, or -1 for memory of its own.
    """

    dtype: DType
    dims: tuple[int | str, ...]
    alias: int = -1


@dataclass(frozen=True)
class Place:
    """A pointer to `at` bytes after the start of an input, an output or a workspace buffer."""

    space: Literal["input", "output", "workspace"]
    index: int
    at: int = 0


@dataclass(frozen=True)
class WorkBuffer:
    """A buffer in the workspace: `rows` rows of `row_bytes`, aligned to 256 bytes.

    Buffers follow one another. In runs of more than `max_rows` rows (None: any number) the buffer
    is not used and has no size.
    """

    row_bytes: int
    max_rows: int | None


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its `Variant.key` and threads per block."""

    key: str
    threads: int


@dataclass(frozen=True)
class Call:
    """One launch, with the index of its kernel. A grid dimension that comes to 0 counts as 1."""

    kernel: int
    grid: tuple[Size, Size, Size]
    arguments: tuple[Place | Size | float, ...]


@dataclass(frozen=True)
class NodeProgram:
    """The calls for runs of up to `max_rows` rows (None: any number), for trees or for chains.

    The first program that fits a run is used. If a node has programs for trees, trees use only
    those; a node that treats both alike has none for trees.
    """

    tree: bool
    max_rows: int | None
    calls: tuple[int, ...]


@dataclass(frozen=True)
class NodeLaunches:
    """The launches of a node; see the module. A run is a tree if the symbol A is greater than 1.

    `symbols` maps each symbol to (input, axis).
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    symbols: dict[str, tuple[int, int]]
    rows: str
    workspace: tuple[WorkBuffer, ...]
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    programs: tuple[NodeProgram, ...]

    def encode(self) -> bytes:
        """Return the bytes, which are the same for equal launches."""
        writer = _Writer()
        writer.list(self.inputs, lambda item: writer.words(DTYPES.index(item.dtype), item.rank))
        writer.list(self.outputs, writer.output)
        writer.list(
            sorted(self.symbols.items()), lambda item: writer.words(_ascii(item[0]), *item[1])
        )
        writer.words(_ascii(self.rows))
        writer.list(self.workspace, writer.buffer)
        writer.list(self.kernels, writer.kernel)
        writer.list(self.calls, writer.call)
        writer.list(self.programs, writer.program)
        return writer.bytes()


def _ascii(symbols: str) -> int:
    return int.from_bytes(symbols.encode("ascii"), "little")


class _Writer:
    def __init__(self) -> None:
        self._count = 0
        self._words = bytearray()
        self._text = b""

    def words(self, *values: int) -> None:
        for value in values:
            self._words += put_varint(value)
        self._count += len(values)

    def list(self, items: Iterable[_Item], write: Callable[[_Item], None]) -> None:
        entries = tuple(items)
        self.words(len(entries))
        for item in entries:
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
        return MAGIC + put_varint(self._count) + self._words + self._text
