"""A model's state and the operations on it, independent of its memory."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from edge.errors import StateError
from edge.runtime import statefile
from edge.runtime.layout import Identity, StateLayout, batch_axis
from edge.runtime.ledger import Ledger, Slots, Tree
from edge.runtime.request import Hold
from edge.runtime.state_memory import Array, Snapshot, StateMemory


class State(StateMemory):
    """The state of `batch` sequences of one model, made by `Engine.new_state`.

    All memory is allocated on creation, none per token. One thread uses a state at a time; a second
    one gets an EngineError. Subclasses implement the memory.

    Attributes:
        identity: identity of the model that the state belongs to.
        window: maximum number of tokens that can be rewound.
        ledger: which slots of the memory hold which tokens.
        workspace: the engine's data for this state; the state only calls its `apply`.
        hold: context manager for exclusive use; raises EngineError while another thread has it.
    """

    ledger: Ledger

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int) -> None:
        super().__init__(layout)
        self.identity = identity
        self.window = window
        self.workspace: Any = None
        self.hold = Hold("the state is in use by another thread", "use one state per thread")

    @property
    def position(self) -> int:
        """Number of tokens consumed, the same for every sequence of the batch."""
        return self.ledger.position

    @property
    def tree(self) -> Tree | None:
        """The last tree run, until a node of it is selected."""
        return self.ledger.tree

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all memory of the state, used or not."""

    @property
    def batch(self) -> int:
        return self.layout.batch

    @property
    def capacity(self) -> int | None:
        """Number of tokens the KV caches hold; None without attention."""
        return self.layout.capacity if self.layout.caches else None

    @property
    def reach(self) -> int:
        """Number of tokens that `rewind` can take back now.

        After a run of T tokens it is at least min(window, reach before + T), counting from the last
        commit. Rewinding n tokens lowers it by n. A failed run and tree nodes that were not
        selected may have overwritten the oldest states: it is then at least min(reach, window - T).
        """
        return 0 if self.ledger.tree is not None else self.ledger.reach

    def arrays(self) -> dict[str, Array]:
        """Return copies of the live state's tensors, batch first as in `edge.tensors`.

        For tests and debugging. Pending tokens are applied first, as in `save`. KV caches contain
        only the rows in use and keep the zero padding of their heads.
        """
        snapshot = self.snapshot(applied=True)
        live = {
            name: np.ascontiguousarray(np.moveaxis(array, batch_axis(name), 0))
            for name, array in snapshot.recurrent.items()
        }
        return live | dict(snapshot.caches)

    def clear(self) -> None:
        """Reset to zeros at position 0."""
        with self.hold:
            self.ledger = self.ledger.with_room(0)
            after = self.ledger.elsewhere(0, 0)
            self._zero((name, self._slot(name, after.here)) for name in self.layout.recurrent)
            self.ledger = after

    def snapshot(self, *, applied: bool = False) -> Snapshot:
        """Return a copy of the live state.

        No token is run: pending tokens are copied as log rows, from which engines with the same
        logs can continue. With `applied`, the engine applies pending tokens first, so that any
        engine of this model can restore the copy. Raises StateError while a tree waits for
        `select`.
        """
        with self.hold:
            self._check_no_tree("snapshot")
            return self._copy(self._applied() if applied else self.ledger.here)

    def restore(self, snapshot: Snapshot) -> None:
        """Set the live state to `snapshot`, which cannot be rewound.

        Raises StateError if the snapshot has a different model or batch size, more tokens than the
        KV caches hold, or pending tokens that this state has no logs or too small a window for.
        """
        with self.hold:
            self.check(snapshot)
            self.adopt(snapshot.recurrent, snapshot.caches, snapshot.position, snapshot.rows)

    def check(self, snapshot: Snapshot) -> None:
        """Raise StateError if `restore` would."""
        if snapshot.identity != self.identity:
            raise StateError("the snapshot belongs to another model")
        if snapshot.batch != self.batch:
            raise StateError(f"the snapshot holds {snapshot.batch} sequences, not {self.batch}")
        foreign = snapshot.rows.keys() != self.layout.logs.keys()
        if snapshot.pending and (foreign or snapshot.pending > self.window):
            raise StateError(
                f"the snapshot has {snapshot.pending} tokens pending in logs, which this state "
                "cannot hold: it is of another engine or has a smaller window",
                remedy="take the snapshot with applied=True",
            )
        self._check_room(snapshot.position)

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens, as if they had never been run.

        Scan states rebuilt from logs may differ in their last bits. Raises StateError beyond
        `reach`; the state is then unchanged.
        """
        with self.hold:
            self._check_no_tree("rewind")
            if count < 0:
                raise StateError(f"cannot rewind by {count} tokens")
            if count > self.ledger.reach:
                raise StateError(
                    f"cannot rewind {count} tokens: {self.ledger.reach} can be taken back",
                    remedy="restore a snapshot, or clear and run the tokens again",
                )
            self.ledger = self.ledger.back(count)

    def select(self, node: int) -> None:
        """Keep the path from a tree's root to `node`, and drop the other nodes.

        -1 keeps none. The nodes of the path are moved together; a path along nodes 0, 1, 2, … moves
        nothing. Raises StateError without a tree and for an unknown node.
        """
        with self.hold:
            tree = self.ledger.tree
            if tree is None:
                raise StateError("no tree was run to select from")
            if not -1 <= node < len(tree.parents):
                raise StateError(f"the tree has no node {node}: it has {len(tree.parents)}")
            path = tree.path(node)
            # parents come before children, so path[i] ≥ i and no row is overwritten unread
            rows = [(self.position + n, self.position + i) for i, n in enumerate(path) if n != i]
            if rows:
                self._move(self.ledger.moves(path), rows)
            self.ledger = self.ledger.chosen(path)

    def fork(self, batch: int | None = None) -> State:
        """Return an independent copy of the state with the same reach. No token is run.

        `batch`: how many times to replicate a single sequence. Raises StateError if a state of
        several sequences is to get a different batch size.
        """
        with self.hold:
            self._check_no_tree("fork")
            batch = self.batch if batch is None else batch
            if batch < 1 or (batch != self.batch and self.batch != 1):
                raise StateError(f"cannot fork {self.batch} sequences into {batch}")
            copy = self._new(self.layout.with_batch(batch))
            if self.workspace is not None:
                self.workspace.engine.attach(copy)
            used = self.ledger.used
            copy._take(self, self._pairs(used, used), self.position, self.ledger.first)
            copy.ledger = self.ledger
            return copy

    def spread(self, other: State) -> None:
        """Copy this state into `other`, a state with n times as many sequences.

        Sequence b becomes sequences b·n to b·n + n - 1 of `other`, which cannot be rewound. This
        state is unchanged. No token is run, unless more are pending than the window of `other`
        holds.

        Raises StateError if `other` has a different model or engine, a number of sequences that is
        not a multiple, or too little room in its KV caches, and while a tree waits for `select`.
        """
        with self.hold, other.hold:
            self._check_no_tree("spread")
            if other.identity != self.identity:
                raise StateError("the states belong to different models")
            if other.batch % self.batch:
                raise StateError(f"cannot spread {self.batch} sequences over {other.batch}")
            other._check_room(self.position)
            if not self._same_memory(other):
                raise StateError("the states belong to different engines")
            fits = len(self.ledger.pending) <= other.window
            slots = self.ledger.here if fits else self._applied()
            other.ledger = other.ledger.with_room(len(slots.rows))
            after = other.ledger.elsewhere(self.position, len(slots.rows))
            first = other._first_needed(self.position)
            other._take(self, self._pairs(slots, after.here), self.position, first)
            other.ledger = after.sliding_from(first)

    def save(self, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
        """Write the live state and `extra` (JSON) to a file atomically.

        The engine applies pending tokens first, so that any engine of the model can load the file.

        Raises StateError while a tree waits for `select`, and if the state is not finite, `extra`
        is not JSON or too large, or writing fails. An existing file at `path` survives any failure.
        """
        snapshot = self.snapshot(applied=True)
        statefile.write(path, self.identity, self.layout, snapshot.position,
                        {**snapshot.recurrent, **snapshot.caches}, extra or {})  # fmt: skip

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a saved state without running its tokens, and return its `extra`.

        Raises StateError for a file that is damaged or truncated, from another model, quantization,
        tokenizer, batch size or version, or longer than the KV caches; the live state is then
        unchanged.
        """
        with self.hold:
            saved = statefile.read(path, self.identity, self.layout)
            self.adopt(
                {name: saved.tensors[name] for name in self.layout.recurrent},
                {name: saved.tensors[name] for name in self.layout.caches},
                saved.position,
                {},
            )
            return saved.extra

    def adopt(
        self,
        recurrent: Mapping[str, Array],
        caches: Mapping[str, Array],
        position: int,
        rows: Mapping[str, Array],
    ) -> None:
        """Copy a whole state in. The caller holds the state and has checked the copy's identity."""
        self._check_room(position)
        pending = max((len(array) for array in rows.values()), default=0)
        self.ledger = self.ledger.with_room(pending)
        after = self.ledger.elsewhere(position, pending)
        first = self._first_needed(position)
        kept = {
            name: array[:, :, max(0, array.shape[2] - (position - first)) :]
            if self.layout.slides(name)
            else array
            for name, array in caches.items()
        }
        pieces = self._pieces(after.here, recurrent, rows if pending else {})
        self._write(pieces, kept, position, first)
        self.ledger = after.sliding_from(first)

    def make_room(self, count: int) -> None:
        """Move the needed rows of sliding caches to the front if `count` more tokens do not fit.

        Source and target rows do not overlap.
        """
        slots, position = self.layout.slots, self.position
        if slots is None or position - self.ledger.first + count <= slots:
            return
        first = self._first_needed(position - self.ledger.reach)
        self._slide(position - first, first)
        self.ledger = self.ledger.sliding_from(first)

    def _first_needed(self, position: int) -> int:
        """Return the first position that the next token attends to in sliding caches.

        `position` is the number of tokens before it. 0 if no cache slides.
        """
        return 0 if self.layout.slots is None else position - self.layout.needed(position)

    def _check_room(self, position: int) -> None:
        if self.layout.caches and position > self.layout.capacity:
            raise StateError(
                f"holds {position} tokens, the KV caches have room for {self.layout.capacity}"
            )

    def _check_no_tree(self, verb: str) -> None:
        if self.ledger.tree is not None:
            raise StateError(
                f"cannot {verb}: a tree was run and no node of it selected",
                remedy="select a node first; select(-1) drops the tree",
            )

    def _applied(self) -> Slots:
        """Return the slots of the live state after applying pending tokens; the reach remains."""
        slots: Slots = self.ledger.here
        return self.workspace.apply(self) if slots.rows else slots

    def _copy(self, slots: Slots) -> Snapshot:
        layout = self.layout
        recurrent = {
            name: np.empty(shape, layout.dtype(name)) for name, shape in layout.recurrent.items()
        }
        rows = {name: np.empty(*layout.rows(name, len(slots.rows))) for name in layout.logs}
        caches = {
            name: np.empty(shape, layout.dtype(name))
            for name, shape in layout.cache_shapes(self.position).items()
        }
        self._read(self._pieces(slots, recurrent, rows), caches, self.position)
        return Snapshot(self.identity, self.batch, self.position, recurrent, caches, rows)

    @abstractmethod
    def _new(self, layout: StateLayout) -> State:
        """Return an empty state in the same kind of memory, without a workspace."""
