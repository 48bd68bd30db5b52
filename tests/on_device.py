"""Where tests run kernels: in Triton's interpreter, compiled for this CPU, or on a GPU.

Tests that use the fixture `where` run once in Triton's interpreter, and once with the kernels for
CPUs for each instruction set of this machine. With EDGE_TEST_DEVICE=cuda they run only on a GPU, in
the way of a bundle's kernels: compiled ahead of time, loaded and launched by `CoreDevice`.
EDGE_TEST_VARIANTS names a folder in which to write down what would have to be compiled; tests are
then skipped where they would run a kernel (`tests/gpu/pack.sh`).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edge.errors import EngineError
from edge.launch import Variant
from edge.plugins.compiler.interpreter import GuardedMemory, InterpretDevice
from edge.plugins.cpu import library
from edge.runtime.cpu.device import CpuDevice
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Device
from tests.gpu.variants import write

ON_GPU = os.environ.get("EDGE_TEST_DEVICE", "cpu") != "cpu"
NOTES = os.environ.get("EDGE_TEST_VARIANTS", "")
INTERPRETED = "interpreted"
_chosen = INTERPRETED
_threads = 2


def places() -> list[Any]:
    """Return the possible values of `where`."""
    if ON_GPU or NOTES:
        return [INTERPRETED]
    if library.path() is None:
        why = "needs the kernels for CPUs (run make test where there is a C++ compiler)"
        return [INTERPRETED, pytest.param("cpu", marks=pytest.mark.skip(reason=why))]
    return [INTERPRETED, *library.instruction_sets()]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses the fixture `where` in all places."""
    metafunc.parametrize("where", places(), indirect=True)


@contextmanager
def running(where: str, threads: int = 2) -> Iterator[None]:
    """Run kernels there inside the context; those for CPUs use this number of threads."""
    global _chosen, _threads
    before, _chosen, _threads = (_chosen, _threads), where, threads
    try:
        yield
    finally:
        _chosen, _threads = before


def chosen() -> str:
    """Return where kernels run now."""
    return _chosen


def native() -> bool:
    """Return whether they are the kernels for CPUs."""
    return _chosen != INTERPRETED


@functools.cache
def gpu() -> CoreDevice:
    """Return the GPU of this process."""
    return CoreDevice(limit_s=60)


def device_with(variants: Iterable[Variant]) -> tuple[Device, list[Any]]:
    """Return the device, and the variants loaded for it in their order."""
    every = list(variants)
    note(every)
    if ON_GPU:
        return gpu(), compiled_for(gpu(), every)
    if native():
        cpu = GuardedCpu(_threads, _chosen)
        return cpu, [cpu.load(each, None, b"") for each in every]
    device = InterpretDevice() if not NOTES else _Noting()
    return device, [device.load(each, None, b"") for each in every]


def compiled_for(device: CoreDevice, variants: list[Variant]) -> list[Any]:
    """Compile the variants for this GPU as an exporter does."""
    from edge.plugins.compiler.aot import compile_variants

    made = compile_variants(variants, [device.sm])[device.sm]
    return [device.load(each, *made.get(each)) for each in variants]


def note(variants: Iterable[Variant]) -> None:
    """Write down what would be compiled, if requested."""
    if NOTES:
        write(Path(NOTES), variants)


def same_sums(found: Tensor, expected: Tensor) -> bool:
    """Check that two kernels' fp32 sums of the same terms agree: bit for bit when interpreted.

    Compiled, each kernel has its own order within a thread: at most 10⁻⁵ of the largest sum apart
    (measured on an H100: 2·10⁻⁶).
    """
    if not ON_GPU and not native():
        return torch.equal(found, expected)
    apart = float((found - expected).abs().max())
    return found.shape == expected.shape and apart <= 1e-5 * float(expected.abs().max())


class GuardedCpu(CpuDevice):
    """A CPU whose memory lies between guard zones that no kernel may write to.

    Its threads share the work in small pieces, so that their bounds are exercised.
    """

    def __init__(self, threads: int, isa: str) -> None:
        super().__init__(threads, isa, finest=True)
        self._guarded: weakref.WeakSet[GuardedMemory] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> Any:
        memory = GuardedMemory(nbytes)
        self._guarded.add(memory)
        return memory

    def wait(self) -> None:
        for memory in self._guarded:
            for zone in memory.guards:
                if (zone != 0xFF).any():
                    memory.guard()
                    raise EngineError(f"bytes beside a buffer of {memory.nbytes} were written")


class _Noting(InterpretDevice):
    def launch(self, *_: object) -> None:
        """Write down the variants; nothing is computed."""
        pytest.skip("noted what it would launch")
