"""A state in a device's memory: two slots of the recurrent state, logs of inputs, KV caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, StateError
from edge.launch import ITEM_SIZE, Log
from edge.runtime.cuda.device import Memory
from edge.runtime.cuda.exclusive import Exclusive, Piece
from edge.runtime.cuda.ledger import Ledger, Tree, log_slots
from edge.runtime.layout import Identity, StateLayout, batch_axis
from edge.runtime.state import State

Array = NDArray[Any]

ALIGNMENT = 256


class Place(NamedTuple):
    """One tensor of the state.

    Attributes:
        offset: where it starts, in bytes.
        nbytes: of all of it.
        slot: bytes of one slot of a recurrent tensor, of one row of a log.
    """

    offset: int
    nbytes: int
    slot: int


def places(
    layout: StateLayout, logs: Mapping[str, Log], window: int
) -> tuple[dict[str, Place], dict[str, Place]]:
    """Recurrent tensors [2, …slot shape] and logs [S, B, width]; KV caches."""
    parts = {
        name: (2, layout.bytes_of(name, shape)) for name, shape in layout.recurrent.items()
    } | {
        name: (log_slots(window), ITEM_SIZE[log.dtype] * layout.batch * log.width)
        for name, log in logs.items()
    }
    caches = {name: (1, layout.bytes_of(name, shape)) for name, shape in layout.caches.items()}
    return _placed(parts), _placed(caches)


def _placed(parts: Mapping[str, tuple[int, int]]) -> dict[str, Place]:
    out: dict[str, Place] = {}
    offset = 0
    for name, (count, slot) in parts.items():
        out[name] = Place(offset, count * slot, slot)
        offset += -(-count * slot // ALIGNMENT) * ALIGNMENT
    return out


def total(placed: Mapping[str, Place]) -> int:
    """Bytes of a block that holds them."""
    return max((-(-(p.offset + p.nbytes) // ALIGNMENT) * ALIGNMENT for p in placed.values()),
               default=0)  # fmt: skip


class DeviceState(State):
    """A state that `CudaEngine` made.

    Attributes:
        ledger: which slots and rows are in use.
        recurrent, caches: the memory; None where the model has no such tensor.
        where, cache_where: tensors in it.
    """

    def __init__(
        self,
        layout: StateLayout,
        identity: Identity,
        logs: Mapping[str, Log],
        exclusive: Exclusive,
        *,
        window: int,
    ) -> None:
        super().__init__(layout, identity, window=window)
        self.ledger = Ledger(window)
        self.logs = logs
        self._exclusive = exclusive
        self.where, self.cache_where = places(layout, logs, window)
        self.recurrent = self._allocate(total(self.where))
        self.caches = self._allocate(total(self.cache_where))

    def _allocate(self, nbytes: int) -> Memory | None:
        if not nbytes:
            return None
        try:
            with self._exclusive as device:
                return device.allocate(nbytes)
        except EngineError as problem:
            raise StateError(
                f"no memory for a state: {problem.message}",
                remedy="make window, batch or capacity smaller",
            ) from None

    @property
    def position(self) -> int:
        """Tokens consumed, the same for every sequence of the batch."""
        return self.ledger.position

    @property
    def tree(self) -> Tree | None:
        """The tree that was run last, while no node of it has been selected."""
        return self.ledger.tree

    @property
    def nbytes(self) -> int:
        """Bytes of slots, logs and caches, used or not."""
        return total(self.where) + total(self.cache_where)

    def address(self, name: str) -> int:
        """Where a recurrent tensor, a log or a cache starts."""
        if name in self.cache_where:
            assert self.caches is not None
            return self.caches.address + self.cache_where[name].offset
        assert self.recurrent is not None
        return self.recurrent.address + self.where[name].offset

    def clear(self) -> None:
        """Back to before any token: zeros, position 0."""
        with self.held():
            with self._exclusive as device:
                for name in self.layout.recurrent:
                    assert self.recurrent is not None
                    at, slot = self._slot(name, self.ledger.spare), self.where[name].slot
                    device.fill(self.recurrent, at, slot, 0)
                device.wait()
            self.ledger = self.ledger.settled(0)

    def _slot(self, name: str, slot: int) -> int:
        return self.where[name].offset + slot * self.where[name].slot

    def _reach(self) -> int:
        return self.ledger.reach

    def _back(self, count: int) -> None:
        self.ledger = self.ledger.back(count)

    def _keep(self, path: list[int]) -> None:
        """Log rows stay where they are; rows of the KV caches close ranks."""
        with self._exclusive as device:
            # parents come before children, so path[i] ≥ i and no row is overwritten unread
            for index, node in enumerate(path):
                if node != index:
                    for at, row in self._cache_starts():
                        assert self.caches is not None
                        first = at + self.position * row
                        device.copy(
                            self.caches, first + index * row, self.caches, first + node * row, row
                        )
            device.wait()
        self.ledger = self.ledger.chosen(tuple(path))

    def _cache_starts(self) -> Iterator[tuple[int, int]]:
        """For every cache, sequence and head: where its rows start, bytes of one."""
        for name, (batch, heads, capacity, width) in self.layout.caches.items():
            row = self.layout.bytes_of(name, (width,))
            for index in range(batch * heads):
                yield self.cache_where[name].offset + index * capacity * row, row

    # -- copies ----------------------------------------------------------------------------------

    def _live(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """What is pending is applied for it in the spare slot; nothing else changes."""
        recurrent = {
            name: np.empty(shape, self.layout.dtype(name))
            for name, shape in self.layout.recurrent.items()
        }
        caches = {
            name: np.empty(shape, self.layout.dtype(name))
            for name, shape in self.layout.cache_shapes(self.position).items()
        }
        with self._exclusive:
            self._exclusive.download(self._pieces(recurrent, caches, self._settled()))
        return recurrent, caches

    def _settled(self) -> int:
        """The slot of the state after all tokens; the caller has the device."""
        if not self.ledger.pending or not self.layout.recurrent:
            return self.ledger.source
        self.workspace.settle(self.ledger.settle())
        return self.ledger.spare

    def _pieces(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], slot: int
    ) -> Iterator[Piece]:
        for name, array in recurrent.items():
            assert self.recurrent is not None
            yield self.recurrent, self._slot(name, slot), array
        for name, array in caches.items():
            assert self.caches is not None
            at, capacity = self.cache_where[name].offset, self.layout.capacity
            row = self.layout.bytes_of(name, array.shape[3:])
            for index, rows in enumerate(array.reshape(-1 if array.size else 0, *array.shape[2:])):
                yield self.caches, at + index * capacity * row, rows

    def _adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None:
        ordered = {n: np.ascontiguousarray(recurrent[n]) for n in self.layout.recurrent}
        rows = {n: np.ascontiguousarray(caches[n]) for n in self.layout.caches}
        self._exclusive.upload(self._pieces(ordered, rows, self.ledger.spare))
        self.ledger = self.ledger.settled(position)

    def _forked(self, batch: int) -> DeviceState:
        layout = self.layout.with_batch(batch)
        copy = DeviceState(layout, self.identity, self.logs, self._exclusive, window=self.window)
        self.workspace.engine.attach(copy)
        if batch == self.batch:
            self._copy_to(copy)
        else:
            self._replicate_to(copy)
        copy.ledger = self.ledger
        return copy

    def _copy_to(self, other: DeviceState) -> None:
        with self._exclusive as device:
            if self.recurrent is not None and other.recurrent is not None:
                device.copy(other.recurrent, 0, self.recurrent, 0, total(self.where))
            if self.caches is not None and other.caches is not None and self.position:
                for at, row in self._cache_starts():
                    device.copy(other.caches, at, self.caches, at, self.position * row)
            device.wait()

    def _replicate_to(self, other: DeviceState) -> None:
        """One sequence to several, by way of the host."""
        shapes = {name: (2, *shape) for name, shape in self.layout.recurrent.items()}
        logs = log_slots(self.window)
        shapes |= {
            name: (logs, 1, ITEM_SIZE[log.dtype] * log.width) for name, log in self.logs.items()
        }
        for name, shape in shapes.items():
            dtype = self.layout.dtype(name) if name in self.layout.recurrent else np.dtype(np.uint8)
            array = np.empty(shape, dtype)
            assert self.recurrent is not None and other.recurrent is not None
            self._exclusive.download([(self.recurrent, self.where[name].offset, array)])
            axis = 1 + batch_axis(name) if name in self.layout.recurrent else 1
            wide = np.repeat(array, other.batch, axis)
            self._exclusive.upload([(other.recurrent, other.where[name].offset, wide)])
        rows = {
            name: np.empty(shape, self.layout.dtype(name))
            for name, shape in self.layout.cache_shapes(self.position).items()
        }
        self._exclusive.download(self._pieces({}, rows, 0))
        wide_rows = {name: np.repeat(array, other.batch, 0) for name, array in rows.items()}
        self._exclusive.upload(other._pieces({}, wide_rows, 0))

    def _spread(self, other: State) -> None:
        """Inside the device."""
        if not isinstance(other, DeviceState) or other._exclusive is not self._exclusive:
            raise StateError("the states belong to different engines")
        count = other.batch // self.batch
        with self._exclusive as device:
            slot = self._settled()
            for name, shape in self.layout.recurrent.items():
                assert self.recurrent is not None and other.recurrent is not None
                start, to = self._slot(name, slot), other._slot(name, other.ledger.spare)
                # whatever comes before the batch is a convolution's rows
                rows = self.batch * (shape[0] if batch_axis(name) else 1)
                size = self.where[name].slot // rows
                for index in range(rows * count):
                    device.copy(other.recurrent, to + index * size,
                                self.recurrent, start + index // count * size, size)  # fmt: skip
            for name, (_, heads, capacity, width) in self.layout.caches.items():
                assert self.caches is not None and other.caches is not None
                start, to = self.cache_where[name].offset, other.cache_where[name].offset
                row = self.layout.bytes_of(name, (width,))
                own, others = capacity * row, other.layout.capacity * row
                for index in range(other.batch * heads if self.position else 0):
                    source = index // heads // count * heads + index % heads
                    device.copy(other.caches, to + index * others,
                                self.caches, start + source * own, self.position * row)  # fmt: skip
            device.wait()
        other.ledger = other.ledger.settled(self.position)
