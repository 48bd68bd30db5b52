"""A state in this process's memory, all of it allocated when the state is created."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from edge.errors import StateError
from edge.runtime.layout import ArrayType, Identity, StateLayout, batch_axis, packed
from edge.runtime.ring import RingLedger, ring_bases
from edge.runtime.state import State
from edge.runtime.state_memory import Array, Piece, StateMemory

if TYPE_CHECKING:
    from edge.runtime.device_slots import DeviceSlots

_ALIGNMENT = 64


class StateBuffers(State):
    """A state in numpy arrays; `edge.runtime.ring` derives the number of slots and bases.

    A run reads the live slot and writes one slot per token. Scan states with logs are stored only
    at some tokens, the bases; the next run brings them up to the live token.

    Attributes:
        rings: input name → [slots, …slot shape] in the layout's dtype; includes the logs.
        bases: input name → [bases, …slot shape], for scan states that have logs.
        caches: input name → [B, KV heads, capacity, padded head_dim].
        device: copies of `rings` and `bases` on a GPU, which may be newer; None without one.
    """

    ledger: RingLedger

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int = 8) -> None:
        super().__init__(layout, identity, window=window)
        self.ledger = RingLedger.start(window, logged=bool(layout.logs))
        slots = self.ledger.slots
        kept = layout.kept(slots, ring_bases(window), slots)
        caches = {name: (shape, layout.dtype(name)) for name, shape in layout.caches.items()}
        arrays = _allocate(kept | caches)
        based = layout.based
        self.bases = {name: arrays[name] for name in layout.recurrent if name in based}
        self.rings = {
            name: arrays[name] for name in (*layout.recurrent, *layout.logs) if name not in based
        }
        self.caches = {name: arrays[name] for name in layout.caches}
        self._tensors = self.rings | self.bases
        self.device: DeviceSlots | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, bases and caches, used or not."""
        arrays = (*self._tensors.values(), *self.caches.values())
        return sum(array.nbytes for array in arrays)

    def _current(self, name: str, slot: int) -> Array:
        """Return a slot to read."""
        if self.device is not None:
            self.device.fetch(name, slot)
        out: Array = self._tensors[name][slot]
        return out

    def _overwritten(self, name: str, slot: int) -> Array:
        """Return a slot of which all will be written."""
        if self.device is not None:
            self.device.replace(name, slot)
        out: Array = self._tensors[name][slot]
        return out

    def _zero(self, slots: Iterable[tuple[str, int]]) -> None:
        for name, slot in slots:
            self._overwritten(name, slot)[...] = 0

    def _read(self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int) -> None:
        for name, slot, array in pieces:
            array[...] = self._current(name, slot)
        for name, array in caches.items():
            at = end - self._first(name)
            array[...] = self.caches[name][:, :, at - array.shape[2] : at]

    def _write(
        self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int, first: int
    ) -> None:
        for name, slot, array in pieces:
            self._overwritten(name, slot)[...] = array
        for name, array in caches.items():
            at = end - self._first(name, first)
            start = at - array.shape[2]
            self.caches[name][:, :, start:at] = array
            # no token attends to these rows, but ONNX Runtime multiplies them by 0: NaN would
            # spread
            self.caches[name][:, :, :start] = 0

    def _move(self, slots: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        for name in self.rings:
            for source, target in slots:
                self._overwritten(name, target)[...] = self._current(name, source)
        for name, cache in self.caches.items():
            first = self._first(name)
            for source, target in rows:
                cache[:, :, target - first] = cache[:, :, source - first]

    def _slide(self, count: int, to: int) -> None:
        for name, cache in self.caches.items():
            if self.layout.slides(name):
                start = to - self.ledger.first
                cache[:, :, :count] = cache[:, :, start : start + count]

    def _same_memory(self, other: StateMemory) -> bool:
        return isinstance(other, StateBuffers)

    def _new(self, layout: StateLayout) -> StateBuffers:
        return StateBuffers(layout, self.identity, window=self.window)

    def _take(
        self, source: StateMemory, slots: Iterable[tuple[str, int, int]], length: int, first: int
    ) -> None:
        assert isinstance(source, StateBuffers)
        times = self.batch // source.batch
        for name, start, to in slots:
            slot, axis = source._current(name, start), batch_axis(name)
            repeated = _split_axis(self._overwritten(name, to), axis, times)
            repeated[...] = slot[:, :, None] if axis else slot[:, None]
        for name, cache in source.caches.items():
            repeated = _split_axis(self.caches[name], 0, times)
            own_first, source_first = self._first(name, first), source._first(name)
            start = max(own_first, source_first)
            rows = cache[:, None, :, start - source_first : length - source_first]
            repeated[:, :, :, start - own_first : length - own_first] = rows
            repeated[:, :, :, : start - own_first] = 0


def _split_axis(array: Array, axis: int, times: int) -> Array:
    """Return a view in which `axis` is split in two, the second of size `times`."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // times, times, *shape[axis + 1 :])


def _allocate(kept: Mapping[str, ArrayType]) -> dict[str, Array]:
    """Allocate all arrays in one zeroed block; zeroing faults its pages in before the first run."""
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (shape, dtype) in kept.items()}
    offsets, total = packed(sizes, _ALIGNMENT)
    try:
        block = np.empty(total + _ALIGNMENT, np.uint8)
        block.fill(0)
    except MemoryError:
        raise StateError(
            f"no memory for a state of {total} bytes",
            remedy="make window, batch or capacity smaller",
        ) from None
    block = block[-block.ctypes.data % _ALIGNMENT :]
    return {
        name: block[offsets[name] : offsets[name] + sizes[name]].view(dtype).reshape(shape)
        for name, (shape, dtype) in kept.items()
    }
