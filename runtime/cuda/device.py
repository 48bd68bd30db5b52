"""What the CUDA engine needs of a device: memory, launches, recorded graphs, and one
thread at a time.

`edge.runtime.cuda.core` is one on an NVIDIA driver; `edge.plugins.compiler.interpreter` is one on
a CPU, through Triton's interpreter.
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
# memory starts on so many bytes, and so does whatever is placed in it
ALIGNMENT = 256


class Memory(Protocol):
    """Device memory that starts on 256 bytes; freed with the last reference."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class RecordedGraph(Protocol):
    """Recorded launches and copies."""

    def replay(self) -> None:
        """Issue them again, on the device's stream."""
        ...


class Device(Protocol):
    """One stream of one device; everything is issued in order.

    All methods raise EngineError; after one that says the device is lost, every later call does.

    Attributes:
        name: for messages.
        sm: compute capability, 87 for 8.7; 0 where any variant can be run (the interpreter).
        records_early: recording takes time or memory that a state is to have taken when it is made;
            else a run is recorded when it is asked for again.
    """

    @property
    def name(self) -> str: ...

    @property
    def sm(self) -> int: ...

    @property
    def records_early(self) -> bool: ...

    def allocate(self, nbytes: int) -> Memory:
        """Zeroed device memory. EngineError when there is none, naming how much was asked for."""
        ...

    def host(self, nbytes: int) -> Bytes:
        """Zeroed host memory that the device copies from and to without staging."""
        ...

    def write(self, target: Memory, at: int, source: Bytes) -> None:
        """Copy from memory made by `host`, when the stream gets there."""
        ...

    def read(self, target: Bytes, source: Memory, at: int) -> None:
        """Copy into memory made by `host`, when the stream gets there."""
        ...

    def copy(self, target: Memory, at: int, source: Memory, start: int, nbytes: int) -> None:
        """Copy inside the device, when the stream gets there."""
        ...

    def fill(self, target: Memory, at: int, nbytes: int, byte: int) -> None: ...

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> Any:
        """A kernel to launch; the interpreter looks at the variant alone."""
        ...

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        """Addresses, integers and floats, of the types that `variant.types` lists."""
        ...

    def record(self) -> AbstractContextManager[list[RecordedGraph]]:
        """What is issued inside is recorded instead of run; the list then holds the graph."""
        ...

    def wait(self) -> None:
        """Wait until everything issued is done. Only here a launch's failure must show."""
        ...


STAGING = 4 << 20

Array = NDArray[Any]
# device memory, an offset in it, and an array that is copied to or from there
Transfer = tuple[Memory, int, Array]


class Exclusive:
    """A device, its lock and a staging buffer; `with` it before anything is issued. A second thread
    waits.

    Raises EngineError in a process that was forked from the one it was made in: a driver's context
    does not survive that.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._hold = Hold("the device is in use", "wait for it", waits=True)
        self._pid = os.getpid()
        self._staging = device.host(STAGING)
        self._left = False

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise forked("device is")

    def __enter__(self) -> Device:
        self.check_process()
        self._hold.take(sys._getframe(1))
        if self._left:
            # what an interrupt left running still reads memory that is about to be written
            try:
                self.device.wait()
            except BaseException:
                self._hold.release()
                raise
            self._left = False
        return self.device

    def __exit__(self, kind: object, *_: object) -> None:
        self._left = self._left or kind is not None
        self._hold.release()

    def download(self, pieces: Iterable[Transfer]) -> None:
        """Fill the arrays from the device's memory."""
        self._staged(pieces, fetch=True)

    def upload(self, pieces: Iterable[Transfer]) -> None:
        """Copy the arrays into the device's memory."""
        self._staged(pieces, fetch=False)

    def _staged(self, pieces: Iterable[Transfer], *, fetch: bool) -> None:
        with self:
            used = 0
            arrived: list[tuple[Bytes, Bytes]] = []
            for memory, at, array in pieces:
                flat: Bytes = array.reshape(-1).view(np.uint8)
                start = 0
                while start < flat.size:
                    if used == STAGING:
                        self._land(arrived)
                        used = 0
                    size = min(flat.size - start, STAGING - used)
                    stage, part = self._staging[used : used + size], flat[start : start + size]
                    if fetch:
                        self.device.read(stage, memory, at + start)
                        arrived.append((part, stage))
                    else:
                        stage[:] = part
                        self.device.write(memory, at + start, stage)
                    start, used = start + size, used + size
            self._land(arrived)

    def _land(self, arrived: list[tuple[Bytes, Bytes]]) -> None:
        self.device.wait()
        for part, stage in arrived:
            part[:] = stage
        arrived.clear()
