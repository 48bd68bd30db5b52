"""Where a plugin's launches run: a GPU, or the interpreter behind a driver without one.

On a CPU the plugin library finds the driver of `tests/fake_cuda` under libcuda's name. Its launches
wait in the stream, as on a GPU, until it is synchronized. Then Triton's interpreter runs each
launch from the bytes that the driver received.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import pytest

from edge.launch import CompiledKernel, Variant
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.plugins.tensorrt import blob
from edge.runtime.cuda.device import Device
from tests import on_device
from tests.cuda.fake_driver import driver
from tests.on_device import ON_GPU

# kernels of this file do not exist: only their launches are observed
UNKNOWN = "recorded."
# hidden trailing pointers of every fake kernel, which must be null
SCRATCH = 2
_FORMATS = {"fp32": "<f", "i32": "<i", "i64": "<q"}


class Launched(NamedTuple):
    """One launch as the driver saw it: `kernel` is `file.function`."""

    kernel: str
    key: str
    grid: tuple[int, int, int]
    arguments: tuple[int | float, ...]


class Machine(Protocol):
    """A device with its stream.

    Attributes:
        sm: compute capability of the kernels.
        launched: launches run by the interpreter since it was last cleared; empty on a GPU.
        kept: objects in use by pending work; released when it is done.
    """

    device: Device
    sm: int
    launched: list[Launched]
    kept: list[object]

    def kernels(self, variants: Iterable[Variant]) -> bytes:
        """Return `blob.pack` of the kernels."""
        ...

    def load(self, variant: Variant) -> Any:
        """Load one of them for `device.launch`."""
        ...

    def stream(self) -> Any:
        """Enter a context in which work may be issued to the stream, a number."""
        ...

    def recorded(self, issue: Callable[[int], None]) -> Callable[[], None]:
        """Record a graph of the work that `issue` gives to the stream; calling it replays it."""
        ...

    def wait(self) -> None: ...


@cache
def machine() -> Machine:
    """Return the machine of this process, as EDGE_TEST_DEVICE says."""
    return _Gpu() if ON_GPU else _Interpreted()


class _Launch(ctypes.Structure):
    """`Launch` of tests/fake_cuda/fake.h."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("count", ctypes.c_int),
        ("bytes", ctypes.c_uint8 * 8 * 64),
    )


_Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Launch))


class _Interpreted:
    sm = 87

    def __init__(self) -> None:
        self.device: Any = InterpretDevice()
        self.launched: list[Launched] = []
        self.kept: list[object] = []
        self._loaded: dict[str, tuple[Variant, Any]] = {}
        self._problem: Exception | None = None
        self._callback = _Run(self._run)
        self._driver = ctypes.CDLL(str(driver()))
        self._stream = ctypes.c_void_p()
        self._context = ctypes.c_void_p()
        with _present():
            self._driver.fake_cuda_kernels(self._callback)
            self._check(self._driver.cuInit(0))
            self._check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0))
            with self._current():
                self._check(self._driver.cuStreamCreate(ctypes.byref(self._stream), 1))

    def kernels(self, variants: Iterable[Variant]) -> bytes:
        """Return text that the fake driver takes for a cubin; a kernel's symbol is its key."""
        variants = list(variants)
        on_device.note(each for each in variants if not each.kernel.startswith(UNKNOWN))
        if on_device.NOTES:
            pytest.skip("noted what it would launch")
        made = {}
        for variant in variants:
            known = not variant.kernel.startswith(UNKNOWN)
            kernel = self.device.load(variant, None, b"") if known else None
            self._loaded[variant.key] = variant, kernel
            sizes = " ".join(str(size) for size in (*map(_size, variant.types), *(8,) * SCRATCH))
            text = f"FAKE CUBIN\n{variant.key} 0 {sizes}\n\0".encode()
            made[variant.key] = (_compiled(variant), text)
        return blob.pack(self.sm, made)

    def load(self, variant: Variant) -> Any:
        return self._loaded[variant.key][1]

    @contextmanager
    def stream(self) -> Iterator[int]:
        with _present(), self._current():
            yield self._stream.value or 0

    def recorded(self, issue: Callable[[int], None]) -> Callable[[], None]:
        driver, graph, executable = self._driver, ctypes.c_void_p(), ctypes.c_void_p()
        with self.stream() as stream:
            self._check(driver.cuStreamBeginCapture(ctypes.c_void_p(stream), 0))
            try:
                issue(stream)
            finally:
                ended = driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
            self._check(ended)
            parameters = (ctypes.c_uint64 * 4)()
            self._check(
                driver.cuGraphInstantiateWithParams(ctypes.byref(executable), graph, parameters)
            )

        def replay() -> None:
            with self.stream() as stream:
                self._check(driver.cuGraphLaunch(executable, ctypes.c_void_p(stream)))

        return replay

    def wait(self) -> None:
        """Wait for the stream. Raises the interpreter's exception, if any."""
        with self.stream() as stream:
            self._check(self._driver.cuStreamSynchronize(ctypes.c_void_p(stream)))
        self.kept.clear()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        self.device.wait()

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._check(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._check(self._driver.cuCtxPopCurrent(None))

    def _check(self, code: int) -> None:
        assert code == 0, f"the fake driver answers {code}"

    def _run(self, name: bytes, launch: Any) -> int:
        if self._problem is None:
            try:
                self._interpret(name.decode(), launch.contents)
            except Exception as problem:  # the driver would swallow it
                self._problem = problem
        return 0

    def _interpret(self, key: str, launch: Any) -> None:
        variant, kernel = self._loaded[key]
        block, shared = tuple(launch.block), launch.shared
        assert block == (32 * variant.warps, 1, 1), f"{variant.kernel}: blocks of {block}"
        assert shared == _compiled(variant).shared_bytes, f"{variant.kernel}: {shared} shared bytes"
        assert launch.count == len(variant.types) + SCRATCH
        values = [bytes(value) for value in launch.bytes[: launch.count]]
        assert all(not any(value) for value in values[-SCRATCH:]), "scratch is not null"
        grid = (launch.grid[0], launch.grid[1], launch.grid[2])
        arguments = tuple(_value(*each) for each in zip(variant.types, values, strict=False))
        self.launched.append(Launched(variant.kernel, key, grid, arguments))
        if kernel is not None:
            self.device.launch(kernel, grid, arguments)


def _size(kind: str) -> int:
    return 8 if kind.startswith("*") else struct.calcsize(_FORMATS[kind])


def _value(kind: str, data: bytes) -> int | float:
    form = "<Q" if kind.startswith("*") else _FORMATS[kind]
    value: int | float = struct.unpack_from(form, data)[0]
    return value


def _compiled(variant: Variant) -> CompiledKernel:
    """Return compiled kernels with varying shared memory, some above the default limit."""
    shared = 16 * (int(variant.key[-3:], 16) + 1)
    return CompiledKernel(file="-", symbol=variant.key, shared_bytes=shared, scratch=SCRATCH)


@contextmanager
def _present() -> Iterator[None]:
    """Make the GPU visible only inside; elsewhere in the process the driver reports none."""
    os.environ["FAKE_CUDA_DEVICES"] = "1"
    try:
        yield
    finally:
        os.environ["FAKE_CUDA_DEVICES"] = "0"


class _Gpu:
    def __init__(self) -> None:
        from edge.runtime.cuda.core import CoreDevice

        self._core = CoreDevice()
        self.device: Device = self._core
        self.sm = self._core.sm
        self._compiled: dict[str, tuple[CompiledKernel, bytes]] = {}
        self.launched: list[Launched] = []
        self.kept: list[object] = []

    def kernels(self, variants: Iterable[Variant]) -> bytes:
        from edge.plugins.compiler.aot import compile_variants

        unique = list(variants)
        made = compile_variants(unique, [self.sm])[self.sm]
        found = {each.key: made.get(each) for each in unique}
        self._compiled |= found
        return blob.pack(self.sm, found)

    def load(self, variant: Variant) -> Any:
        return self.device.load(variant, *self._compiled[variant.key])

    @contextmanager
    def stream(self) -> Iterator[int]:
        with self._core._turns:
            yield int(self._core.place.handle)

    def recorded(self, issue: Callable[[int], None]) -> Callable[[], None]:
        with self._core.record() as graphs, self.stream() as stream:
            issue(stream)
        return graphs[0].replay

    def wait(self) -> None:
        self._core.wait()
        self.kept.clear()
