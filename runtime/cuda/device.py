"""Interface of the CUDA engine's devices: memory, launches and recorded graphs; and the lock that
admits one thread at a time.

`edge.runtime.cuda.core` implements it on an NVIDIA driver, `edge.plugins.compiler.interpreter` on
the CPU with Triton's interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.launch import CompiledKernel, Variant
from edge.runtime.engine import forked
from edge.runtime.request import Hold

Bytes = NDArray[np.uint8]
# alignment in bytes of allocations and of everything placed in them
ALIGNMENT = 256


class Memory(Protocol):
    """Device memory aligned to 256 bytes; freed with the last reference."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class RecordedGraph(Protocol):
    """Recorded launches and copies."""

    def replay(self) -> None:
        """Issue the recorded work again on the device's stream."""
        ...


class Device(Protocol):
    """One stream of one device; all work is issued in order.

    All methods raise EngineError. Once the device is lost, every later call raises it too.

    Attributes:
        name: name of the device, for messages.
        sm: compute capability, 87 for 8.7; 0 if any variant can run (the interpreter).
        records_early: whether runs are recorded when a state is made, because recording takes time
            or memory; otherwise a run is recorded when it is first repeated.
    """

    @property
    def name(self) -> str: ...

    @property
    def sm(self) -> int: ...

    @property
    def records_early(self) -> bool: ...

    def allocate(self, nbytes: int) -> Memory:
        """Allocate zeroed device memory. Raises EngineError with the size if memory is short."""
        ...

    def host(self, nbytes: int) -> Bytes:
        """Allocate zeroed host memory that the device copies from and to without staging."""
        ...

    def write(self, target: Memory, at: int, source: Bytes) -> None:
        """Issue a copy from memory allocated by `host` to the device."""
        ...

    def read(self, target: Bytes, source: Memory, at: int) -> None:
        """Issue a copy from the device into memory allocated by `host`."""
        ...

    def copy(self, target: Memory, at: int, source: Memory, start: int, nbytes: int) -> None:
        """Issue a copy within the device."""
        ...

    def fill(self, target: Memory, at: int, nbytes: int, byte: int) -> None: ...

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> Any:
        """Return a kernel for `launch`. The interpreter uses only the variant."""
        ...

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        """Issue a launch. `arguments`: addresses, integers and floats as in `variant.types`."""
        ...

    def record(self) -> AbstractContextManager[list[RecordedGraph]]:
        """Record the work issued inside instead of running it; the list then holds the graph."""
        ...

    def wait(self) -> None:
        """Wait until all issued work is done. A failed launch need not raise before this."""
        ...


STAGING = 4 << 20

Array = NDArray[Any]
# device memory, a byte offset in it, and the array to copy to or from there
Transfer = tuple[Memory, int, Array]


class Exclusive:
    """A device with its lock and a staging buffer; enter it before issuing work. A second thread
    waits.

    Raises EngineError in a forked child process, where the driver's context is invalid.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._hold = Hold("the device is in use", "wait for it", waits=True)
        self._pid = os.getpid()
        self._staging = device.host(STAGING)
        self._unfinished = False

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked("device is")

    def __enter__(self) -> Device:
        self.check_process()
        self._hold.take(sys._getframe(1))
        if self._unfinished:
            # work that an interrupt left running still reads memory that is about to be written
            try:
                self.device.wait()
            except BaseException:
                self._hold.release()
                raise
            self._unfinished = False
        return self.device

    def __exit__(self, kind: object, *_: object) -> None:
        self._unfinished = self._unfinished or kind is not None
        self._hold.release()

    def download(self, pieces: Iterable[Transfer]) -> None:
        """Copy device memory into the arrays."""
        self._copy_staged(pieces, fetch=True)

    def upload(self, pieces: Iterable[Transfer]) -> None:
        """Copy the arrays into device memory."""
        self._copy_staged(pieces, fetch=False)

    def _copy_staged(self, pieces: Iterable[Transfer], *, fetch: bool) -> None:
        with self:
            used = 0
            downloads: list[tuple[Bytes, Bytes]] = []
            for memory, at, array in pieces:
                flat: Bytes = array.reshape(-1).view(np.uint8)
                start = 0
                while start < flat.size:
                    if used == STAGING:
                        self._finish_downloads(downloads)
                        used = 0
                    size = min(flat.size - start, STAGING - used)
                    stage, part = self._staging[used : used + size], flat[start : start + size]
                    if fetch:
                        self.device.read(stage, memory, at + start)
                        downloads.append((part, stage))
                    else:
                        stage[:] = part
                        self.device.write(memory, at + start, stage)
                    start, used = start + size, used + size
            self._finish_downloads(downloads)

    def _finish_downloads(self, downloads: list[tuple[Bytes, Bytes]]) -> None:
        self.device.wait()
        for part, stage in downloads:
            part[:] = stage
        downloads.clear()
