"""A state in this process's memory, which is all taken when the state is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import StateError
from edge.runtime.layout import Identity, StateLayout, batch_axis
from edge.runtime.ring import Place, Tree, bases_for
from edge.runtime.state import State

Array = NDArray[Any]

_ALIGNMENT = 64


class StateBuffers(State):
    """A state in numpy arrays (`edge.runtime.ring` says how many of what, and why).

    A run reads the live slot and writes one slot per token, so going back is choosing a slot. Scan
    states with logs are kept for some tokens, their bases, and brought up to the live token by the
    next run, or by `_settle`. KV caches are written in place and go back by length.

    Attributes:
        place: which slots, bases and rows are in use.
        rings: input name → [slots, …slot shape], of the layout's type for it; logs too.
        bases: likewise [bases, …slot shape], of the scan states that have logs.
        caches: input name → [B, KV heads, capacity, padded head_dim].
    """

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int = 8) -> None:
        super().__init__(layout, identity, window=window)
        self.place = Place.start(window, logged=bool(layout.logs))
        arrays = _allocate(layout, self.place.slots, bases_for(window))
        based = layout.based
        self.bases = {name: arrays[name] for name in layout.recurrent if name in based}
        self.rings = {
            name: arrays[name] for name in (*layout.recurrent, *layout.logs) if name not in based
        }
        self.caches = {name: arrays[name] for name in layout.caches}

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
        """Bytes of every slot, base and cache, used or not."""
        arrays = (*self.rings.values(), *self.bases.values(), *self.caches.values())
        return sum(array.nbytes for array in arrays)

    def clear(self) -> None:
        """Back to before any token: zeros, position 0."""
        with self.held():
            slot, base = self.place.spare_slots()[0], self.place.spare_bases()[0]
            for ring in self.rings.values():
                ring[slot] = 0
            for bases in self.bases.values():
                bases[base] = 0
            self.place = self.place.settled(slot, 0, base)

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

    def _settle(self) -> dict[str, Array]:
        """The live recurrent state, as views: its scan states are brought up to the live token."""
        if self.place.pending:
            self.workspace.settle(self)
        live, base = self.place.live, self.place.base
        return {
            name: self.bases[name][base] if name in self.bases else self.rings[name][live]
            for name in self.layout.recurrent
        }

    def _live(self) -> tuple[dict[str, Array], dict[str, Array]]:
        live = {name: array.copy() for name, array in self._settle().items()}
        length = self.position
        return live, {name: cache[:, :, :length].copy() for name, cache in self.caches.items()}

    def _spare(self) -> tuple[int, int, dict[str, Array]]:
        """A slot and a base that nothing uses, and the recurrent tensors in them."""
        slot, base = self.place.spare_slots()[0], self.place.spare_bases()[0]
        return slot, base, {
            name: self.bases[name][base] if name in self.bases else self.rings[name][slot]
            for name in self.layout.recurrent
        }  # fmt: skip

    def _adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None:
        slot, base, target = self._spare()
        for name, array in target.items():
            array[...] = recurrent[name]
        for name, cache in self.caches.items():
            cache[:, :, :position] = caches[name]
        self.place = self.place.settled(slot, position, base)

    def _forked(self, batch: int) -> StateBuffers:
        copy = StateBuffers(self.layout.with_batch(batch), self.identity, window=self.window)
        if self.workspace is not None:
            self.workspace.engine.attach(copy)
        # a batch of 1 broadcasts
        for slot in self.place.history:
            for name, ring in self.rings.items():
                copy.rings[name][slot] = ring[slot]
        for base in self.place.bases:
            for name, bases in self.bases.items():
                copy.bases[name][base.slot] = bases[base.slot]
        for name, cache in self.caches.items():
            copy.caches[name][:, :, : self.position] = cache[:, :, : self.position]
        copy.place = self.place
        return copy

    def _spread(self, other: State) -> None:
        """Nothing is allocated."""
        if not isinstance(other, StateBuffers):
            raise StateError("the states belong to different engines")
        count, length = other.batch // self.batch, self.position
        slot, base, target = other._spare()
        for name, source in self._settle().items():
            axis = batch_axis(name)
            wide = _repeated(target[name], axis, count)
            wide[...] = source[:, :, None] if axis else source[:, None]
        for name, cache in self.caches.items():
            wide = _repeated(other.caches[name], 0, count)
            wide[:, :, :, :length] = cache[:, None, :, :length]
        other.place = other.place.settled(slot, length, base)


def _repeated(array: Array, axis: int, count: int) -> Array:
    """A view with an axis of `count` behind `axis`, whose neighbours it counts."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] // count, count, *shape[axis + 1 :])


def _allocate(layout: StateLayout, slots: int, bases: int) -> dict[str, Array]:
    """Every ring, base and cache in one zeroed block: zeroing touches its pages before a run."""
    kept = layout.kept(slots, bases)
    kept |= {name: (shape, layout.dtype(name)) for name, shape in layout.caches.items()}
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (shape, dtype) in kept.items()}
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
    for name, (shape, dtype) in kept.items():
        flat = block[offset : offset + sizes[name]]
        arrays[name] = flat.view(dtype).reshape(shape)
        offset += _aligned(sizes[name])
    return arrays


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
