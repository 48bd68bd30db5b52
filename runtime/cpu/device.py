"""A CPU as the launch plan's device: memory of this process, compiled kernels, lists of calls."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.plugins.cpu.library import (
    CallValue,
    CpuCall,
    CpuKernel,
    instruction_set,
    library,
    text_of,
)
from edge.runtime.cuda.device import ALIGNMENT, RecordedGraph

Bytes = NDArray[np.uint8]


class HostMemory:
    """Zeroed bytes that start on 256."""

    def __init__(self, nbytes: int) -> None:
        try:
            block = np.zeros(nbytes + ALIGNMENT, np.uint8)
        except MemoryError:
            raise EngineError(f"no memory for {nbytes} bytes") from None
        start = -block.ctypes.data % ALIGNMENT
        self.nbytes = nbytes
        self.data: Bytes = block[start : start + nbytes]
        self.address = self.data.ctypes.data

    def take_small_pages(self) -> None:
        """Have memory taken in pages of 4 KB where it is touched, not of 2 MB as numpy asks for."""
        advice = getattr(mmap, "MADV_NOHUGEPAGE", None)
        skipped = -self.address % mmap.PAGESIZE
        if advice is not None and self.nbytes > skipped:
            size = ctypes.c_size_t(self.nbytes - skipped)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address + skipped), size, advice)


class Pool:
    """Threads that share the kernels' work; the caller is one of them."""

    def __init__(self, threads: int, *, finest: bool = False) -> None:
        """`finest`: share all work in small pieces, whatever it is worth: for tests.

        Raises EngineError: the system refuses this many threads.
        """
        self._library = library()
        self._process = os.getpid()
        self.threads = threads
        self.handle = self._library.edge_cpu_pool(threads, finest)
        if not self.handle:
            raise EngineError(f"no {threads} threads could be started", field="threads")

    def run(self, calls: ctypes.Array[CpuCall]) -> None:
        """Run them in order. Raises EngineError: no memory."""
        if self._library.edge_cpu_run(self.handle, calls, len(calls)):
            raise EngineError("no memory for a kernel's intermediate values")

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        # a forked child has no such threads, and would wait for them; at the end there is no `os`
        if getattr(self, "handle", None) and self._process == getpid():
            self._library.edge_cpu_pool_free(self.handle)


class CallList:
    """Calls in order, made ready to be run any number of times."""

    def __init__(self, pool: Pool, calls: Sequence[CpuCall], kept: Sequence[Any]) -> None:
        self._pool = pool
        self._calls = (CpuCall * len(calls))(*calls)
        self._kept = list(kept)  # kernels, values and memory that the calls point to

    def replay(self) -> None:
        self._pool.run(self._calls)


class CpuDevice:
    """See `edge.runtime.cuda.device.Device`. Everything is done before a call returns.

    Attributes:
        name: with the instruction set.
        sm: 0, for kernels are found by the variant alone.
        pool: what runs the calls.
    """

    sm = 0
    records_early = False

    def __init__(self, threads: int, isa: str | None = None, *, finest: bool = False) -> None:
        """`isa`: the instruction set; None is the best one. `finest`: see `Pool`.

        Raises EngineError: no library, or too few threads.
        """
        self.isa = instruction_set() if isa is None else isa
        self.name = f"CPU, {self.isa}, {threads} thread{'s' if threads > 1 else ''}"
        self.pool = Pool(threads, finest=finest)
        self._copy = CpuKernel("kernel copy", self.isa)
        self._fill = CpuKernel("kernel fill", self.isa)
        self._recording: tuple[list[CpuCall], list[Any]] | None = None

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def host(self, nbytes: int) -> Bytes:
        return HostMemory(nbytes).data

    def write(self, target: Any, at: int, source: Bytes) -> None:
        self._move(target.data[at : at + source.nbytes], source)

    def read(self, target: Bytes, source: Any, at: int) -> None:
        self._move(target, source.data[at : at + target.nbytes])

    def copy(self, target: Any, at: int, source: Any, start: int, nbytes: int) -> None:
        self._move(target.data[at : at + nbytes], source.data[start : start + nbytes])

    def _move(self, target: Bytes, source: Bytes) -> None:
        if target.nbytes != source.nbytes:
            raise EngineError(f"{source.nbytes} bytes do not fit {target.nbytes}")
        if self._recording is None:
            np.copyto(target, source)
            return
        values = (CallValue * 2)(
            CallValue(address=target.ctypes.data), CallValue(address=source.ctypes.data)
        )
        self._add(self._copy, values, (target.nbytes, 0, 0), (target, source))

    def fill(self, target: Any, at: int, nbytes: int, byte: int) -> None:
        part = target.data[at : at + nbytes]
        if self._recording is None:
            part.fill(byte)
            return
        values = (CallValue * 1)(CallValue(address=part.ctypes.data))
        self._add(self._fill, values, (nbytes, byte, 0), part)

    # -- launches --------------------------------------------------------------------------------

    def load(
        self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes
    ) -> tuple[CpuKernel, tuple[str, ...]]:
        """A kernel, and which member of `CallValue` each argument is. Raises EngineError: none."""
        members = []
        for kind in variant.types:
            pointer, number = kind.startswith("*"), kind.startswith("fp")
            members.append("address" if pointer else "number" if number else "integer")
        return CpuKernel(text_of(variant), self.isa), tuple(members)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        made, members = kernel
        values = (CallValue * len(members))()
        for value, member, argument in zip(values, members, arguments, strict=True):
            setattr(value, member, argument)
        if self._recording is None:
            self.pool.run((CpuCall * 1)(_call(made, values, grid)))
        else:
            self._add(made, values, grid, None)

    def _add(self, kernel: CpuKernel, values: Any, grid: tuple[int, int, int], memory: Any) -> None:
        assert self._recording is not None
        calls, kept = self._recording
        calls.append(_call(kernel, values, grid))
        kept.append((kernel, values, memory))

    @contextmanager
    def record(self) -> Iterator[list[RecordedGraph]]:
        """See `Device.record`. Raises EngineError inside another recording."""
        if self._recording is not None:
            raise EngineError("a recording is under way")
        out: list[RecordedGraph] = []
        recording: tuple[list[CpuCall], list[Any]] = ([], [])
        self._recording = recording
        try:
            yield out
        finally:
            self._recording = None
        out.append(CallList(self.pool, *recording))

    def weave(
        self, shared: CallList, own: Sequence[CallList], order: Iterable[tuple[bool, int]]
    ) -> CallList:
        """Calls for all states and those of each, in one list: whether one is of each, and which of
        its list's, in order. One call makes those of all states that are of the same launch.
        """
        calls: list[CpuCall] = []
        kept: list[Any] = [shared, *own]
        for each, at in order:
            if not each:
                calls.append(shared._calls[at])
                continue
            values = (CallValue * len(own))()
            for value, of_state in zip(values, own, strict=True):
                value.address = ctypes.addressof(of_state._calls[at].values.contents)
            first = own[0]._calls[at]
            calls.append(CpuCall(first.kernel, values, first.grid, len(own)))
            kept.append(values)
        return CallList(self.pool, calls, kept)

    def wait(self) -> None:
        """Nothing is under way."""


def _call(kernel: CpuKernel, values: Any, grid: tuple[int, int, int]) -> CpuCall:
    return CpuCall(
        kernel.handle, ctypes.cast(values, ctypes.POINTER(CallValue)), (ctypes.c_int64 * 3)(*grid)
    )
