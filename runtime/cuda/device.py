"""What the CUDA engine needs of a device: memory, launches, recorded graphs. Nothing else.

`edge.runtime.cuda.core` is one on an NVIDIA driver; `edge.plugins.compiler.interpreter` is one on
a CPU, through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.launch import CompiledKernel, Variant

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
        """Until everything issued is done. The only place where a launch's failure must show."""
        ...
