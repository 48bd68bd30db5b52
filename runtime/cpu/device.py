"""The CPU as a launch plan's device: host memory, compiled kernels and lists of kernel calls."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, InputError
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
    """Zeroed bytes, aligned to 256."""

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
        """Use pages of 4 KB, allocated on first touch, instead of numpy's 2 MB huge pages."""
        advice = getattr(mmap, "MADV_NOHUGEPAGE", None)
        skipped = -self.address % mmap.PAGESIZE
        if advice is not None and self.nbytes > skipped:
            size = ctypes.c_size_t(self.nbytes - skipped)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address + skipped), size, advice)


class Pool:
    """Threads that share the kernels' work; the caller is one of them."""

    def __init__(self, threads: int, *, finest: bool = False, pin: bool = False) -> None:
        """Start the threads. `finest`: split all work into the smallest pieces, for tests.
        `pin`: keep thread i on the i-th CPU the caller may use; 0 is the caller, left as it is.

        Raises InputError for more pinned threads than CPUs, and EngineError if the system cannot
        pin threads or refuses this many.
        """
        self._library = library()
        self._process = os.getpid()
        self.threads, self.pinned = threads, pin
        if pin:
            _check_pinnable(self._library.edge_cpu_pinnable(), threads)
        self.handle = self._library.edge_cpu_pool(threads, finest, pin)
        if not self.handle:
            raise EngineError(f"no {threads} threads could be started", field="threads")

    def run(self, calls: ctypes.Array[CpuCall]) -> None:
        """Run the calls in order. Raises EngineError if memory runs out."""
        if self._library.edge_cpu_run(self.handle, calls, len(calls)):
            raise EngineError("no memory for a kernel's intermediate values")

    def __del__(self, getpid: Callable[[], int] = os.getpid) -> None:
        # a forked child does not have the threads and would wait for them forever; `getpid` is an
        # argument because `os` may be gone at interpreter exit
        if getattr(self, "handle", None) and self._process == getpid():
            self._library.edge_cpu_pool_free(self.handle)


def _check_pinnable(cpus: int, threads: int) -> None:
    if not cpus:
        raise EngineError(
            "threads cannot be pinned on this system", field="pin", remedy="leave pin out"
        )
    if threads > cpus:
        raise InputError(
            f"cannot pin {threads} threads: this process may use {cpus} "
            f"CPU{'s' if cpus > 1 else ''}",
            field="pin",
            remedy=f"use at most {cpus} threads, or leave pin out",
        )


class CallList:
    """Calls in order, prepared to run any number of times."""

    def __init__(self, pool: Pool, calls: Sequence[CpuCall], kept: Sequence[Any]) -> None:
        self._pool = pool
        self._calls = (CpuCall * len(calls))(*calls)
        self._kept = list(kept)  # kernels, values and memory that the calls point to

    def replay(self) -> None:
        self._pool.run(self._calls)


class CpuDevice:
    """See `edge.runtime.cuda.device.Device`. All methods are synchronous.

    Attributes:
        isa: the instruction set.
        name: display name, with instruction set and number of threads.
        sm: 0, because the variant alone selects a kernel.
        pool: threads that run the calls.
    """

    sm = 0
    records_early = False

    def __init__(
        self, threads: int, isa: str | None = None, *, finest: bool = False, pin: bool = False
    ) -> None:
        """`isa`: instruction set; None is the best available. `finest`, `pin`: see `Pool`.

        Raises EngineError if the library is missing or the threads cannot be started, and
        InputError for more pinned threads than CPUs.
        """
        self.isa = instruction_set() if isa is None else isa
        self.name = f"CPU, {self.isa}, {threads} thread{'s' if threads > 1 else ''}"
        self.pool = Pool(threads, finest=finest, pin=pin)
        self._copy = CpuKernel("kernel copy", self.isa)
        self._fill = CpuKernel("kernel fill", self.isa)
        self._recording: tuple[list[CpuCall], list[Any]] | None = None

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

    def load(
        self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes
    ) -> tuple[CpuKernel, tuple[str, ...]]:
        """Return a kernel, and the member of `CallValue` for each argument.

        Raises EngineError if there is no such kernel.
        """
        members = []
        for kind in variant.types:
            pointer, number = kind.startswith("*"), kind.startswith("fp")
            members.append("address" if pointer else "number" if number else "integer")
        return CpuKernel(text_of(variant), self.isa), tuple(members)

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        cpu_kernel, members = kernel
        values = (CallValue * len(members))()
        for value, member, argument in zip(values, members, arguments, strict=True):
            setattr(value, member, argument)
        if self._recording is None:
            self.pool.run((CpuCall * 1)(_call(cpu_kernel, values, grid)))
        else:
            self._add(cpu_kernel, values, grid, None)

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
        """Merge shared calls and per-state calls into one list.

        `order` has, for each launch, whether it is per state, and its index in its list. The
        per-state calls of a launch become one call for all states.
        """
        calls: list[CpuCall] = []
        kept: list[Any] = [shared, *own]
        for per_state, index in order:
            if not per_state:
                calls.append(shared._calls[index])
                continue
            values = (CallValue * len(own))()
            for value, call_list in zip(values, own, strict=True):
                value.address = ctypes.addressof(call_list._calls[index].values.contents)
            first = own[0]._calls[index]
            calls.append(CpuCall(first.kernel, values, first.grid, len(own)))
            kept.append(values)
        return CallList(self.pool, calls, kept)

    def wait(self) -> None:
        """Do nothing: all calls are synchronous."""


def _call(kernel: CpuKernel, values: Any, grid: tuple[int, int, int]) -> CpuCall:
    return CpuCall(
        kernel.handle, ctypes.cast(values, ctypes.POINTER(CallValue)), (ctypes.c_int64 * 3)(*grid)
    )
