"""A state in this process's memory, which is all taken when the state is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import StateError
from edge.runtime.layout import Identity, StateLayout, batch_axis
from edge.runtime.ring import Place, Tree, slots_for
from edge.runtime.state import State

Array = NDArray[Any]

_ALIGNMENT = 64


class StateBuffers(State):
    """A state in numpy arrays.

    Recurrent tensors are rings of 2·window + 1 slots (`edge.runtime.ring` says why); a run reads
    the live slot and writes one slot per token, so going back is choosing a slot. KV caches are
    written in place and go back by length.

    Attributes:
        place: which slots and rows are in use.
        rings: input name → [slots, …slot shape], of the layout's type for it.
        caches: input name → [B, KV heads, capacity, padded head_dim].
    """

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int = 8) -> None:
        super().__init__(layout, identity, window=window)
        self.place = Place(window)
        self.rings, self.caches = _allocate(layout, window)

    @property
    def position(self) -> int:
        """Tokens consumed, the same for every sequence of the batch."""
        return self.place.position

    @property
    def tree(self) -> Tree | None:
        """The tree that was run last, while no node of it has been selected."""
        return self.place.tree

    @property
    def nbytes(self) -> int:
        """Bytes of every slot and cache, used or not."""
        arrays = (*self.rings.values(), *self.caches.values())
        return sum(array.nbytes for array in arrays)

    def clear(self) -> None:
        """Back to before any token: zeros, position 0."""
        with self.held():
            slot = self.place.spare_slots()[0]
            for ring in self.rings.values():
                ring[slot] = 0
            self.place = self.place.settled(slot, 0)

    def _reach(self) -> int:
        return self.place.reach

    def _back(self, count: int) -> None:
        self.place = self.place.back(count)

    def _keep(self, path: list[int]) -> None:
        tree = self.place.tree
        assert tree is not None
        self.place = self.place.pruned()
        # parents come before children, so path[i] ≥ i and no state is overwritten unread
        for index, source in enumerate(path):
            if source != index:
                self._move(tree.start, source, index)
        self.place = self.place.advanced(tree.start, len(path))

    def _move(self, start: int, source: int, target: int) -> None:
        for ring in self.rings.values():
            ring[start + target] = ring[start + source]
        for cache in self.caches.values():
            cache[:, :, self.position + target] = cache[:, :, self.position + source]

    def _live(self) -> tuple[dict[str, Array], dict[str, Array]]:
        live = {name: ring[self.place.live].copy() for name, ring in self.rings.items()}
        length = self.position
        return live, {name: cache[:, :, :length].copy() for name, cache in self.caches.items()}

    def _adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None:
        slot = self.place.spare_slots()[0]
        for name, ring in self.rings.items():
            ring[slot] = recurrent[name]
        for name, cache in self.caches.items():
            cache[:, :, :position] = caches[name]
        self.place = self.place.settled(slot, position)

    def _forked(self, batch: int) -> StateBuffers:
        copy = StateBuffers(self.layout.with_batch(batch), self.identity, window=self.window)
        if self.workspace is not None:
            self.workspace.engine.attach(copy)
        history = self.place.history
        for slot, source in enumerate(history):
            for name, ring in self.rings.items():
                copy.rings[name][slot] = ring[source]  # a batch of 1 broadcasts
        for name, cache in self.caches.items():
            copy.caches[name][:, :, : self.position] = cache[:, :, : self.position]
        copy.place = self.place._replace(history=tuple(range(len(history))))
        return copy

    def _spread(self, other: State) -> None:
        """Nothing is allocated."""
        if not isinstance(other, StateBuffers):
            raise StateError("the states belong to different engines")
        count, length = other.batch // self.batch, self.position
        slot = other.place.spare_slots()[0]
        for name, ring in self.rings.items():
            axis = batch_axis(name)
            source = ring[self.place.live]
            wide = _repeated(other.rings[name][slot], axis, count)
            wide[...] = source[:, :, None] if axis else source[:, None]
        for name, cache in self.caches.items():
            wide = _repeated(other.caches[name], 0, count)
            wide[:, :, :, :length] = cache[:, None, :, :length]
        other.place = other.place.settled(slot, length)


def _repeated(array: Array, axis: int, count: int) -> Array:
    """A view with an axis of `count` behind `axis`, whose neighbours it counts."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // count, count, *shape[axis + 1 :])


def _allocate(layout: StateLayout, window: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Every ring and cache in one zeroed block: zeroing touches its pages before the first run."""
    slots = slots_for(window)
    shapes = {name: (slots, *shape) for name, shape in layout.recurrent.items()} | layout.caches
    sizes = {name: layout.bytes_of(name, shape) for name, shape in shapes.items()}
    total = sum(map(_aligned, sizes.values()))
    try:
        block = np.empty(total + _ALIGNMENT, np.uint8)
        block.fill(0)
    except MemoryError:
        raise StateError(
            f"no memory for a state of {total} bytes",
            remedy="make window, batch or capacity smaller",
        ) from None
    offset = -block.ctypes.data % _ALIGNMENT
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        flat = block[offset : offset + sizes[name]]
        arrays[name] = flat.view(layout.dtype(name)).reshape(shape)
        offset += _aligned(sizes[name])
    rings = {name: arrays[name] for name in layout.recurrent}
    return rings, {name: arrays[name] for name in layout.caches}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
