"""A device without a GPU: kernels run in Triton's interpreter, one program after the other.

It implements the protocol `edge.runtime.cuda.device.Device`, thousands of times slower than a GPU.
It tests launches, memory and the ledger, and detects errors that a GPU would not: pointers that are
not aligned as declared, copies beyond a buffer, writes next to one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.launch import CompiledKernel, Variant
from edge.plugins.catalogue import kernel_module

Bytes = NDArray[np.uint8]
VARIABLE = "TRITON_INTERPRET"
ALIGNMENT = 256
# Bytes that no kernel can use by accident: NaN in fp16 and fp32, -1 in integers.
_GUARD_BYTE, _GUARD = 0xFF, 4096
# Triton's types: bytes, and torch's names
_TYPES = {
    "fp32": (4, "float32"),
    "fp16": (2, "float16"),
    "i8": (1, "int8"),
    "u8": (1, "uint8"),
    "i32": (4, "int32"),
    "i64": (8, "int64"),
}
# the interpreter patches Triton's own modules while a kernel runs
_LOCK = threading.Lock()


class GuardedMemory:
    """Bytes between two guard zones."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._block: Bytes = np.zeros(nbytes + 2 * _GUARD + ALIGNMENT, np.uint8)
        except MemoryError:
            raise EngineError(f"no memory for {nbytes} bytes") from None
        self._start = _GUARD + (-(self._block.ctypes.data + _GUARD) % ALIGNMENT)
        self.address = self._block.ctypes.data + self._start
        self.data = self._block[self._start : self._start + nbytes]
        self.guards = (self._block[: self._start], self._block[self._start + nbytes :])
        self.guard()

    def guard(self) -> None:
        for zone in self.guards:
            zone[:] = _GUARD_BYTE

    def at(self, address: int) -> Bytes:
        """Return the eight bytes at `address`, which may be the end of the buffer."""
        start = address - self._block.ctypes.data
        return self._block[start : start + 8]

    def part(self, at: int, nbytes: int) -> Bytes:
        """Return some bytes of the buffer. Raises EngineError when they are outside it."""
        if at < 0 or nbytes < 0 or at + nbytes > self.nbytes:
            raise EngineError(f"bytes {at} to {at + nbytes} are outside a buffer of {self.nbytes}")
        return self.data[at : at + nbytes]


class Recorded:
    """The actions issued during a recording."""

    def __init__(self, actions: list[Callable[[], None]]) -> None:
        self._actions = actions

    def replay(self) -> None:
        for action in self._actions:
            action()


class InterpretDevice:
    """A device that runs kernels in Triton's interpreter; see the module.

    Attributes:
        name, sm: see `Device`.
    """

    name = "Triton's interpreter"
    sm = 0
    records_early = True

    def __init__(self, package: str | None = None) -> None:
        """Load kernels from `package`, or from the ops' folders if None.

        Raises EngineError when TRITON_INTERPRET is not set, or Triton or torch is missing.
        """
        if os.environ.get(VARIABLE) != "1":
            raise EngineError(
                "Triton interprets kernels only if this is set before it is imported",
                field=VARIABLE,
                remedy=f"set {VARIABLE}=1",
            )
        missing = [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]
        if missing:
            raise EngineError(
                f"interpreting kernels needs {' and '.join(missing)}",
                remedy="pip install 'mamba-edge[kernels]'; in a checkout, run make test",
            )
        self._package = package
        self.memories: weakref.WeakSet[GuardedMemory] = weakref.WeakSet()
        self._hosts: dict[int, weakref.ref[Bytes]] = {}
        self._recording: list[Callable[[], None]] | None = None
        self._launched: list[str] = []

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> GuardedMemory:
        memory = GuardedMemory(nbytes)
        self.memories.add(memory)
        return memory

    def host(self, nbytes: int) -> Bytes:
        array: Bytes = np.zeros(nbytes, np.uint8)
        self._hosts = {key: ref for key, ref in self._hosts.items() if ref() is not None}
        self._hosts[id(array)] = weakref.ref(array)
        return array

    def write(self, target: GuardedMemory, at: int, source: Bytes) -> None:
        self._check_host(source)
        part = target.part(at, source.nbytes)
        self._issue(lambda: np.copyto(part, source))

    def read(self, target: Bytes, source: GuardedMemory, at: int) -> None:
        self._check_host(target)
        part = source.part(at, target.nbytes)
        self._issue(lambda: np.copyto(target, part))

    def copy(
        self, target: GuardedMemory, at: int, source: GuardedMemory, start: int, nbytes: int
    ) -> None:
        destination, part = target.part(at, nbytes), source.part(start, nbytes)
        if np.shares_memory(destination, part):
            raise EngineError(f"a copy of {nbytes} bytes onto itself")
        self._issue(lambda: np.copyto(destination, part))

    def fill(self, target: GuardedMemory, at: int, nbytes: int, byte: int) -> None:
        part = target.part(at, nbytes)
        self._issue(lambda: part.fill(byte))

    def _check_host(self, array: Bytes) -> None:
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        reference = self._hosts.get(id(owner))
        if reference is None or reference() is not owner or not array.flags.c_contiguous:
            raise EngineError("needs contiguous memory allocated by host()")

    # -- launches --------------------------------------------------------------------------------

    def load(self, variant: Variant, compiled: CompiledKernel | None, cubin: bytes) -> Any:
        """Return (variant, function). Raises EngineError for an unknown function or parameters."""
        file, _, name = variant.kernel.partition(".")
        module = f"{self._package}.{file}" if self._package else kernel_module(file)
        try:
            function = getattr(importlib.import_module(module), name) if module else None
        except (ImportError, AttributeError):
            function = None
        if function is None:
            raise EngineError(f"unknown kernel {variant.kernel}")
        if type(function).__name__ != "InterpretedFunction":
            raise EngineError(
                "this was not set when Triton was imported",
                field=VARIABLE,
                remedy=f"set {VARIABLE}=1 before the process starts",
            )
        provided = [*variant.arguments, *variant.constants]
        parameters = inspect.signature(function.fn).parameters
        # parameters newer than the plan keep their defaults
        required = [
            name for name, parameter in parameters.items() if parameter.default is parameter.empty
        ]
        if not set(required) <= set(provided) <= set(parameters):
            raise EngineError(f"{variant.kernel} takes {function.arg_names} but got {provided}")
        return variant, function

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | float]
    ) -> None:
        variant, function = kernel
        if min(grid) < 1:
            raise EngineError(f"{variant.kernel}: the grid {grid} is empty")
        values = {
            name: self._argument(variant, name, kind, value)
            for name, kind, value in zip(variant.arguments, variant.types, arguments, strict=True)
        }
        self._issue(lambda: self.run_kernel(variant, function, grid, values))

    def _argument(self, variant: Variant, name: str, kind: str, value: int | float) -> Any:
        if not kind.startswith("*"):
            return float(value) if kind.startswith("fp") else int(value)
        kind, _, multiple = kind[1:].partition(":")
        address = int(value)
        memory = next(
            (m for m in self.memories if m.address <= address <= m.address + m.nbytes), None
        )
        if memory is None or address % int(multiple or _TYPES[kind][0]):
            fault = "points to no buffer" if memory is None else "is not aligned as declared"
            raise EngineError(f"{variant.kernel}: {name} {fault}")
        import torch

        # Kernels see only an address and a type. The interpreter shares one storage among arguments
        # at the same address, so all views have the same size.
        return torch.from_numpy(memory.at(address)).view(getattr(torch, _TYPES[kind][1]))

    def run_kernel(
        self, variant: Variant, function: Any, grid: tuple[int, int, int], values: dict[str, Any]
    ) -> None:
        """Interpret a kernel for every program of the grid. Raises EngineError if one fails."""
        self._launched.append(variant.kernel)
        try:
            with _LOCK, np.errstate(all="ignore"):
                function[grid](**values, **variant.constants)
        except Exception as problem:
            raise EngineError(f"{variant.kernel} failed: {problem}") from problem

    # -- order -----------------------------------------------------------------------------------

    @contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """Record issued actions instead of running them. Raises EngineError when nested."""
        if self._recording is not None:
            raise EngineError("a recording is under way")
        recordings: list[Recorded] = []
        actions: list[Callable[[], None]] = []
        self._recording = actions
        try:
            yield recordings
        finally:
            self._recording = None
        recordings.append(Recorded(actions))

    def _issue(self, action: Callable[[], None]) -> None:
        if self._recording is None:
            action()
        else:
            self._recording.append(action)

    def wait(self) -> None:
        """Check the guard zones. Raises EngineError when one was written since the last call."""
        launched, self._launched = dict.fromkeys(self._launched), []
        for memory in self.memories:
            for where, zone in zip(("before", "after"), memory.guards, strict=True):
                if (zone != _GUARD_BYTE).any():
                    memory.guard()
                    raise EngineError(
                        f"bytes {where} a buffer of {memory.nbytes} were written by one of: "
                        f"{', '.join(launched) or 'no kernel'}"
                    )
