"""Detect races between the programs of a launch while the interpreter runs them one by one.

A GPU runs a launch's programs in any order and many at once; the interpreter has a fixed order.
Here the order is shuffled, and the bytes that each program reads and writes are recorded. A launch
fails

- when two programs write different values to a byte;
- when a program reads a byte that another writes;
- when one store writes two different values to a byte;
- when a program reads what it wrote without a barrier in between: its threads are not in step.

Two programs may write the same value. Masked-out elements of a load are poison, since they are
undefined on a GPU without `other`. Warps within a program are not checked otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from edge.plugins.compiler.interpreter import InterpretDevice

Array = NDArray[Any]
_NOTHING: Array = np.zeros(0, np.int64)


class Race(AssertionError):
    """A conflict between two programs of a launch over the same bytes."""


@dataclass
class Program:
    """The accesses of one program: addresses of bytes, and the bytes it wrote."""

    reads: list[Array] = field(default_factory=list)
    writes: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)
    since_barrier: list[Array] = field(default_factory=list)


class Launch:
    """One launch while it runs. Its methods raise Race."""

    def __init__(self, kernel: str, grid: tuple[int, int, int], rng: np.random.Generator) -> None:
        self.kernel, self.grid = kernel, grid
        self._order = rng.permutation(int(np.prod(grid)))
        self._programs: list[Program] = []

    def begin(self, *place: int) -> tuple[int, ...]:
        """Start the program whose turn it is after shuffling, instead of the one at `place`."""
        turn = self._order[np.ravel_multi_index(place, self.grid)]
        self._programs.append(Program())
        return tuple(int(i) for i in np.unravel_index(turn, self.grid))

    def read(self, addresses: Array) -> None:
        now = self._programs[-1]
        addresses = _distinct([addresses])
        now.reads.append(addresses)
        if not now.since_barrier:
            return
        wrote = _distinct(now.since_barrier)
        now.since_barrier = [wrote]
        if _among(addresses, wrote)[1].any():
            raise Race(f"{self.kernel}: a program reads what it wrote, without a barrier")

    def write(self, addresses: Array, values: Array) -> None:
        now = self._programs[-1]
        order = np.lexsort((values, addresses))
        a, v = addresses[order], values[order]
        if ((a[1:] == a[:-1]) & (v[1:] != v[:-1])).any():
            raise Race(f"{self.kernel}: one store writes a byte twice, and not the same")
        now.writes.append(addresses)
        now.values.append(values)
        now.since_barrier.append(addresses)

    def barrier(self) -> None:
        self._programs[-1].since_barrier.clear()

    def check(self) -> None:
        """Check all programs against each other after the last one has run."""
        numbers = range(len(self._programs))
        wrote = np.concatenate([_NOTHING, *(a for p in self._programs for a in p.writes)])
        values = np.concatenate([_NOTHING, *(v for p in self._programs for v in p.values)])
        owner = np.repeat([*numbers], [sum(map(len, p.writes)) for p in self._programs])
        if wrote.size == 0:
            return
        order = np.argsort(wrote, kind="stable")
        wrote, starts = np.unique(wrote[order], return_index=True)
        first, last = (f.reduceat(owner[order], starts) for f in (np.minimum, np.maximum))
        low, high = (f.reduceat(values[order], starts) for f in (np.minimum, np.maximum))
        if count := int(((first != last) & (low != high)).sum()):
            raise Race(f"{self.kernel}: programs write {count} bytes, and not the same")
        for number, program in enumerate(self._programs):
            at, there = _among(_distinct(program.reads), wrote)
            others = (first[at] != number) | (last[at] != number)
            if count := int((there & others).sum()):
                raise Race(f"{self.kernel}: a program reads {count} bytes that another writes")


def _distinct(parts: Sequence[Array]) -> Array:
    """Return the distinct addresses, sorted; np.unique hashes them, which is slow."""
    addresses = np.sort(np.concatenate([_NOTHING, *parts]), kind="stable")  # merges sorted parts
    return addresses[np.diff(addresses, prepend=-1) != 0]


def _among(addresses: Array, wrote: Array) -> tuple[Array, Array]:
    """Return where in the sorted `wrote` each address would be, and whether it is there."""
    at = np.minimum(np.searchsorted(wrote, addresses), len(wrote) - 1)
    return at, wrote[at] == addresses


@contextmanager
def watched(seed: int = 0) -> Iterator[Counter[str]]:
    """Watch every launch of an InterpretDevice; it raises Race.

    Yields the maximum number of programs by kernel, updated as launches come.
    """
    most: Counter[str] = Counter()
    rng = np.random.default_rng(seed)
    real = InterpretDevice.run_kernel

    def run(device: Any, variant: Any, function: Any, grid: Any, values: Any) -> None:
        launch = Launch(variant.kernel, grid, rng)
        with _noted(launch):
            real(device, variant, function, grid, values)
        launch.check()
        most[variant.kernel] = max(most[variant.kernel], int(np.prod(grid)))

    with mock.patch.object(InterpretDevice, "run_kernel", run):
        yield most


@contextmanager
def _noted(launch: Launch) -> Iterator[None]:
    """Report the interpreter's accesses to `launch`."""
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    place = InterpreterBuilder.set_grid_idx

    def masked_load(b: Any, pointers: Any, mask: Any, other: Any, *how: Any) -> Any:
        found = load(b, pointers, mask, other, *how)
        kept = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        launch.read(_bytes(pointers.data[kept], found.data.itemsize))
        if other is None and not kept.all():
            found.data[~kept] = np.nan if found.data.dtype.kind == "f" else -1
        return found

    def masked_store(b: Any, pointers: Any, value: TensorHandle, mask: Any, *how: Any) -> Any:
        kept = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        values = np.ascontiguousarray(np.broadcast_to(value.data, pointers.data.shape)[kept])
        addresses = _bytes(pointers.data[kept], values.itemsize)
        launch.write(addresses, values.reshape(-1).view(np.uint8).astype(np.int64))
        return store(b, pointers, value, mask, *how)

    with mock.patch.multiple(
        InterpreterBuilder,
        create_masked_load=masked_load,
        create_masked_store=masked_store,
        create_barrier=lambda b: launch.barrier(),
        set_grid_idx=lambda b, *at: place(b, *launch.begin(*at)),
    ):
        yield


def _bytes(pointers: Array, size: int) -> Array:
    """Return the addresses of all bytes of elements of `size`."""
    starts = pointers.astype(np.int64).reshape(-1)
    return (starts[:, None] + np.arange(size)).reshape(-1)
