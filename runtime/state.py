"""A model's state and its verbs. All memory is taken when the state is made, none per token."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, StateError
from edge.runtime import statefile
from edge.runtime.layout import Identity, StateLayout, batch_axis
from edge.runtime.ring import Place, slots_for

Array = NDArray[Any]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Snapshot:
    """A copy of the live state: one recurrent state and the KV rows in use.

    Attributes:
        position: tokens consumed.
        nbytes: memory it holds, bytes.
    """

    identity: Identity
    batch: int
    position: int
    recurrent: Mapping[str, Array]
    caches: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        arrays = (*self.recurrent.values(), *self.caches.values())
        return sum(array.nbytes for array in arrays)


class _Hold:
    """A lock that refuses instead of waiting."""

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise EngineError(
                "the state is in use by another thread", remedy="use one state per thread"
            )

    def __exit__(self, *_: object) -> None:
        self._busy.release()


class StateBuffers:
    """The state of `batch` sequences of one model, made by `Engine.new_state`.

    Recurrent tensors are rings of 2·window + 1 slots (`edge.runtime.ring` says why); a run reads
    the live slot and writes one slot per token, so going back is choosing a slot. KV caches are
    written in place and go back by length. One thread uses a state at a time; a second one gets
    an EngineError.

    Attributes:
        window: most tokens of a run that can be taken back.
        place: which slots and rows are in use.
        rings: input name → [slots, …slot shape], of the layout's type for it.
        caches: input name → [B, KV heads, capacity, padded head_dim].
        workspace: what the engine keeps with the state; not the state's business.
    """

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int = 8) -> None:
        self.layout = layout
        self.identity = identity
        self.window = window
        self.place = Place(window)
        self.workspace: Any = None
        self.rings, self.caches = _allocate(layout, window)
        self._hold = _Hold()

    # -- what it is ------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens consumed, the same for every sequence of the batch."""
        return self.place.position

    @property
    def batch(self) -> int:
        return self.layout.batch

    @property
    def capacity(self) -> int | None:
        """Tokens the KV caches hold, or None: without attention a state has no end."""
        return self.layout.capacity if self.layout.caches else None

    @property
    def nbytes(self) -> int:
        """Bytes of every slot and cache, used or not."""
        arrays = (*self.rings.values(), *self.caches.values())
        return sum(array.nbytes for array in arrays)

    @property
    def reach(self) -> int:
        """How many tokens `rewind` can take back now.

        After a run of T tokens at least min(window, reach before + T), counting from the last
        commit. Rewinding n lowers it by n. A run that failed, and tree nodes that were not chosen,
        may have used slots of the oldest states: it is then at least min(reach, window - T).
        """
        return 0 if self.place.tree else self.place.reach

    def arrays(self) -> dict[str, Array]:
        """Copies of the live state, batch first, as in `edge.tensors`; KV rows in use only.

        For tests and debugging. Key and value caches keep the zero padding of their heads.
        """
        self._needs_choice("read")
        live = {
            name: np.moveaxis(ring[self.place.live], batch_axis(name), 0).copy()
            for name, ring in self.rings.items()
        }
        return live | self._cache_rows(self.position)

    # -- going back ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Back to before any token: zeros, position 0."""
        with self.held():
            slot = self.place.spare_slots()[0]
            for ring in self.rings.values():
                ring[slot] = 0
            self.place = self.place.settled(slot, 0)

    def snapshot(self) -> Snapshot:
        """A copy of the live state. Raises StateError while a tree waits for `select`."""
        with self.held():
            self._needs_choice("snapshot")
            live = {name: ring[self.place.live].copy() for name, ring in self.rings.items()}
            return Snapshot(
                self.identity, self.batch, self.position, live, self._cache_rows(self.position)
            )

    def restore(self, snapshot: Snapshot) -> None:
        """Make the live state that of `snapshot`; nothing behind it can be rewound.

        Raises StateError: another model's, another batch size, more tokens than the KV caches hold.
        """
        with self.held():
            if snapshot.identity != self.identity:
                raise StateError("the snapshot belongs to another model")
            if snapshot.batch != self.batch:
                raise StateError(f"the snapshot holds {snapshot.batch} sequences, not {self.batch}")
            self.adopt(snapshot.recurrent, snapshot.caches, snapshot.position)

    def rewind(self, count: int) -> None:
        """As if the last `count` tokens had never been run.

        Raises StateError beyond `reach`, saying how far it could go; the state is then unchanged.
        """
        with self.held():
            self._needs_choice("rewind")
            if count < 0:
                raise StateError(f"cannot rewind by {count} tokens")
            if count > self.place.reach:
                raise StateError(
                    f"cannot rewind {count} tokens: {self.place.reach} can be taken back",
                    remedy="restore a snapshot, or clear and run the tokens again",
                )
            self.place = self.place.back(count)

    def select(self, node: int) -> None:
        """After a tree run: keep the path from the root to `node`, forget its other nodes.

        -1 keeps none. The path's states and KV rows move next to each other where they were not
        already; a path along nodes 0, 1, 2, … moves nothing. Raises StateError: no tree, no such
        node.
        """
        with self.held():
            tree = self.place.tree
            if tree is None:
                raise StateError("there is no tree to select from")
            if not -1 <= node < len(tree.parents):
                raise StateError(f"the tree has no node {node}: it has {len(tree.parents)}")
            path: list[int] = []
            while node != -1:
                path.append(node)
                node = tree.parents[node]
            path.reverse()
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

    def fork(self, batch: int | None = None) -> StateBuffers:
        """A second state that goes its own way, with the same reach; `batch` replicates one
        sequence that many times. Raises StateError: a batch of several cannot become another.
        """
        with self.held():
            self._needs_choice("fork")
            batch = self.batch if batch is None else batch
            if batch < 1 or (batch != self.batch and self.batch != 1):
                raise StateError(f"cannot fork {self.batch} sequences into {batch}")
            copy = self._empty_like(batch)
            history = self.place.history
            for slot, source in enumerate(history):
                for name, ring in self.rings.items():
                    copy.rings[name][slot] = ring[source]  # a batch of 1 broadcasts
            for name, cache in self.caches.items():
                copy.caches[name][:, :, : self.position] = cache[:, :, : self.position]
            copy.place = self.place._replace(history=tuple(range(len(history))))
            return copy

    def _empty_like(self, batch: int) -> StateBuffers:
        layout = self.layout.with_batch(batch)
        copy = StateBuffers(layout, self.identity, window=self.window)
        if self.workspace is not None:
            self.workspace.engine.attach(copy)
        return copy

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Write the live state and `extra` (JSON) to a file, whole or not at all.

        Raises StateError: a tree waits for `select`, the state is not finite, `extra` is no JSON or
        too large, the disk refuses. An existing file at `path` survives any failure.
        """
        snapshot = self.snapshot()
        statefile.write(path, self.identity, self.layout, snapshot.position,
                        {**snapshot.recurrent, **snapshot.caches}, extra or {})  # fmt: skip

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Make a saved state live, without running its tokens, and return its `extra`.

        Raises StateError for a file that is damaged, cut short, of another model, quantization,
        tokenizer, batch size or version, or longer than the KV caches; the live state is then
        unchanged.
        """
        with self.held():
            saved = statefile.read(path, self.identity, self.layout)
            self.adopt(
                {name: saved.tensors[name] for name in self.rings},
                {name: saved.tensors[name] for name in self.caches},
                saved.position,
            )
            return saved.extra

    # -- inside ----------------------------------------------------------------------------------

    def held(self) -> _Hold:
        """Hold the state for this thread. Raises EngineError while another one does."""
        return self._hold

    def adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None:
        """Copy a whole state in; the caller holds the state and has checked where it comes from."""
        if self.caches and position > self.layout.capacity:
            raise StateError(
                f"holds {position} tokens, the KV caches have room for {self.layout.capacity}"
            )
        slot = self.place.spare_slots()[0]
        for name, ring in self.rings.items():
            ring[slot] = recurrent[name]
        for name, cache in self.caches.items():
            cache[:, :, :position] = caches[name]
        self.place = self.place.settled(slot, position)

    def _needs_choice(self, verb: str) -> None:
        if self.place.tree is not None:
            raise StateError(
                f"cannot {verb}: a tree was run and no node of it selected",
                remedy="select a node first; select(-1) drops the tree",
            )

    def _cache_rows(self, length: int) -> dict[str, Array]:
        return {name: cache[:, :, :length].copy() for name, cache in self.caches.items()}


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
