"""A state in device memory: slots of recurrent tensors, input logs and KV caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from edge.errors import EngineError, StateError
from edge.runtime.cuda.device import ALIGNMENT, Device, Exclusive, Memory, Transfer
from edge.runtime.layout import ArrayType, Identity, StateLayout, batch_axis, packed
from edge.runtime.ledger import ReplayLedger, log_slots
from edge.runtime.state import State
from edge.runtime.state_memory import Array, Piece, StateMemory


class StateTensor(NamedTuple):
    """Placement of one tensor of the state.

    Attributes:
        offset: byte offset of its start.
        nbytes: total size in bytes.
        slot: bytes of one slot of a recurrent tensor, one row of a log or a whole KV cache.
    """

    offset: int
    nbytes: int
    slot: int


class TensorBlock(NamedTuple):
    """Tensors that share one allocation, and its size in bytes."""

    tensors: dict[str, StateTensor]
    nbytes: int


def blocks(layout: StateLayout, window: int, slots: int) -> tuple[TensorBlock, TensorBlock]:
    """Lay out the recurrent tensors [slots, …slot shape] with the logs [S, B, width], and the KV
    caches.
    """
    caches = {name: ((1, *s), layout.dtype(name)) for name, s in layout.caches.items()}
    return _block(layout.kept(slots, slots, log_slots(window))), _block(caches)


def _block(arrays: Mapping[str, ArrayType]) -> TensorBlock:
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (shape, dtype) in arrays.items()}
    offsets, nbytes = packed(sizes, ALIGNMENT)
    return TensorBlock(
        {
            n: StateTensor(offsets[n], sizes[n], sizes[n] // shape[0])
            for n, (shape, _) in arrays.items()
        },
        nbytes,
    )


class DeviceState(State):
    """A state of a `CudaEngine`.

    Attributes:
        recurrent: memory of the recurrent tensors and logs; None if the model has none.
        caches: memory of the KV caches; None if the model has none.
        where, cache_where: placement of the tensors in `recurrent` and in `caches`.
    """

    ledger: ReplayLedger

    def __init__(
        self,
        layout: StateLayout,
        identity: Identity,
        exclusive: Exclusive,
        *,
        window: int,
        slots: int,
    ) -> None:
        super().__init__(layout, identity, window=window)
        self.ledger = ReplayLedger(window, slots)
        self._exclusive = exclusive
        recurrent, caches = blocks(layout, window, slots)
        self.where, self.cache_where = recurrent.tensors, caches.tensors
        self._nbytes = recurrent.nbytes + caches.nbytes
        self.recurrent = self._allocate(recurrent.nbytes)
        self.caches = self._allocate(caches.nbytes)

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
    def nbytes(self) -> int:
        """Bytes of all slots, logs and caches, used or not."""
        return self._nbytes

    def address(self, name: str) -> int:
        """Return the device address of a recurrent tensor, a log or a KV cache."""
        cached = name in self.cache_where
        memory = self.caches if cached else self.recurrent
        assert memory is not None
        return memory.address + (self.cache_where if cached else self.where)[name].offset

    def cache_starts(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, byte offset of its rows, bytes per row) of each cache, sequence and head."""
        for name, (batch, heads, capacity, width) in self.layout.caches.items():
            row = self.layout.bytes_of(name, (width,))
            for index in range(batch * heads):
                yield name, self.cache_where[name].offset + index * capacity * row, row

    # -- see `StateMemory` -----------------------------------------------------------------------

    def _slot_at(self, name: str, slot: int) -> tuple[Memory, int, int]:
        """Return the memory of a slot, its byte offset there and its size."""
        assert self.recurrent is not None
        tensor = self.where[name]
        return self.recurrent, tensor.offset + slot * tensor.slot, tensor.slot

    def _zero(self, slots: Iterable[tuple[str, int]]) -> None:
        with self._exclusive as device:
            for name, slot in slots:
                device.fill(*self._slot_at(name, slot), 0)
            device.wait()

    def _read(self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int) -> None:
        self._exclusive.download(self._transfers(pieces, caches, end, self.ledger.first))

    def _write(
        self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int, first: int
    ) -> None:
        with self._exclusive as device:
            for name, array in caches.items():
                self._clear(device, name, end - array.shape[2] - self._first(name, first))
        self._exclusive.upload(self._transfers(pieces, caches, end, first))

    def _clear(self, device: Device, name: str, rows: int) -> None:
        """Zero the first rows of a cache when only later rows are copied in. No query attends to
        them, but values multiplied by 0 must be finite.
        """
        batch, heads, capacity, width = self.layout.caches[name]
        row = self.layout.bytes_of(name, (width,))
        for index in range(batch * heads if rows > 0 else 0):
            assert self.caches is not None
            at = self.cache_where[name].offset + index * capacity * row
            device.fill(self.caches, at, rows * row, 0)

    def _transfers(
        self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int, first: int
    ) -> Iterator[Transfer]:
        for name, slot, array in pieces:
            memory, at, _ = self._slot_at(name, slot)
            yield memory, at, array
        for name, array in caches.items():
            assert self.caches is not None
            row = self.layout.bytes_of(name, array.shape[3:])
            start = end - array.shape[2] - self._first(name, first)
            at = self.cache_where[name].offset + start * row
            head = self.layout.caches[name][2] * row
            for index, rows in enumerate(array.reshape(-1 if array.size else 0, *array.shape[2:])):
                yield self.caches, at + index * head, rows

    def _move(self, slots: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        with self._exclusive as device:
            for name, at, row in self.cache_starts():
                first = self._first(name)
                for source, target in rows:
                    self._copy_rows(device, at, row, source - first, target - first, 1)
            device.wait()

    def _slide(self, count: int, to: int) -> None:
        with self._exclusive as device:
            for name, at, row in self.cache_starts():
                if self.layout.slides(name):
                    self._copy_rows(device, at, row, to - self.ledger.first, 0, count)
            device.wait()

    def _copy_rows(
        self, device: Device, at: int, row: int, source: int, target: int, count: int
    ) -> None:
        """Copy `count` rows of `row` bytes within the head at `at`, from slot `source` to `target`.
        The ranges must not overlap.
        """
        assert self.caches is not None
        start, to = at + source * row, at + target * row
        device.copy(self.caches, to, self.caches, start, count * row)

    def _same_memory(self, other: StateMemory) -> bool:
        return isinstance(other, DeviceState) and other._exclusive is self._exclusive

    def _new(self, layout: StateLayout) -> DeviceState:
        window, slots = self.window, self.ledger.slots
        return DeviceState(layout, self.identity, self._exclusive, window=window, slots=slots)

    def _take(
        self, source: StateMemory, slots: Iterable[tuple[str, int, int]], length: int, first: int
    ) -> None:
        """See `StateMemory._take`. Copies inside the device, in as few pieces as possible."""
        assert isinstance(source, DeviceState)
        times = self.batch // source.batch
        with self._exclusive as device:
            for name, start, to in slots:
                memory, at, nbytes = source._slot_at(name, start)
                own, target, _ = self._slot_at(name, to)
                if times == 1:
                    device.copy(own, target, memory, at, nbytes)
                    continue
                # an axis before the batch holds a convolution's rows
                leading = self.layout.recurrent[name][0] if batch_axis(name) else 1
                parts = source.batch * leading
                size = nbytes // parts
                for index in range(parts * times):
                    device.copy(
                        own, target + index * size, memory, at + index // times * size, size
                    )
            self._copy_cache_rows(source, times, length, first)
            device.wait()

    def _copy_cache_rows(self, source: DeviceState, times: int, length: int, first: int) -> None:
        device = self._exclusive.device
        for name, (batch, heads, capacity, width) in self.layout.caches.items():
            assert self.caches is not None and source.caches is not None
            row = self.layout.bytes_of(name, (width,))
            start, to = source.cache_where[name].offset, self.cache_where[name].offset
            source_stride, stride = source.layout.caches[name][2] * row, capacity * row
            own_first, source_first = self._first(name, first), source._first(name)
            count = length - max(own_first, source_first)
            self._clear(device, name, length - count - own_first)
            to += (length - count - own_first) * row
            start += (length - count - source_first) * row
            for index in range(batch * heads if count else 0):
                source_index = index // heads // times * heads + index % heads
                device.copy(
                    self.caches, to + index * stride, source.caches,
                    start + source_index * source_stride, count * row,
                )  # fmt: skip
