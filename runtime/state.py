"""A model's state and its verbs, whatever memory it is in."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError, StateError
from edge.runtime import statefile
from edge.runtime.layout import Identity, StateLayout, batch_axis

Array = NDArray[Any]


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


class Hold:
    """A lock that refuses instead of waiting."""

    def __init__(self, refusal: str, remedy: str) -> None:
        self._busy = threading.Lock()
        self._refusal, self._remedy = refusal, remedy

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise EngineError(self._refusal, remedy=self._remedy)

    def __exit__(self, *_: object) -> None:
        self._busy.release()


class Branched(Protocol):
    """A tree run whose path has not been chosen."""

    @property
    def parents(self) -> tuple[int, ...]: ...


class State(ABC):
    """The state of `batch` sequences of one model, made by `Engine.new_state`.

    All memory is taken when it is made, none per token. One thread uses a state at a time; a second
    one gets an EngineError.

    Attributes:
        layout: names, shapes and types of its tensors.
        identity: what it belongs to.
        window: most tokens of a run that can be taken back.
        workspace: what the engine keeps with the state; not the state's business.
    """

    def __init__(self, layout: StateLayout, identity: Identity, *, window: int) -> None:
        self.layout = layout
        self.identity = identity
        self.window = window
        self.workspace: Any = None
        self._hold = Hold("the state is in use by another thread", "use one state per thread")

    # -- what it is ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def position(self) -> int:
        """Tokens consumed, the same for every sequence of the batch."""

    @property
    @abstractmethod
    def tree(self) -> Branched | None:
        """The tree that was run last, while no node of it has been selected."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything the state keeps, used or not."""

    @property
    def batch(self) -> int:
        return self.layout.batch

    @property
    def capacity(self) -> int | None:
        """Tokens the KV caches hold, or None: without attention a state has no end."""
        return self.layout.capacity if self.layout.caches else None

    @property
    def reach(self) -> int:
        """How many tokens `rewind` can take back now.

        After a run of T tokens at least min(window, reach before + T), counting from the last
        commit. Rewinding n lowers it by n. A run that failed, and tree nodes that were not chosen,
        may have used the room of the oldest ones: it is then at least min(reach, window - T).
        """
        return 0 if self.tree is not None else self._reach()

    def arrays(self) -> dict[str, Array]:
        """Copies of the live state, batch first, as in `edge.tensors`; KV rows in use only.

        For tests and debugging. Key and value caches keep the zero padding of their heads.
        """
        snapshot = self._copied("read")
        live = {
            name: np.ascontiguousarray(np.moveaxis(array, batch_axis(name), 0))
            for name, array in snapshot.recurrent.items()
        }
        return live | dict(snapshot.caches)

    # -- going back ------------------------------------------------------------------------------

    @abstractmethod
    def clear(self) -> None:
        """Back to before any token: zeros, position 0."""

    def snapshot(self) -> Snapshot:
        """A copy of the live state. Raises StateError while a tree waits for `select`."""
        with self.held():
            return self._copied("snapshot")

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
        """As if the last `count` tokens had never been run; scan states that are rebuilt from logs
        have other last bits.

        Raises StateError beyond `reach`, saying how far it could go; the state is then unchanged.
        """
        with self.held():
            self._needs_choice("rewind")
            if count < 0:
                raise StateError(f"cannot rewind by {count} tokens")
            if count > self._reach():
                raise StateError(
                    f"cannot rewind {count} tokens: {self._reach()} can be taken back",
                    remedy="restore a snapshot, or clear and run the tokens again",
                )
            self._back(count)

    def select(self, node: int) -> None:
        """After a tree run: keep the path from the root to `node`, forget its other nodes.

        -1 keeps none. What was kept of the path moves together where it was not already; a path
        along nodes 0, 1, 2, … moves nothing. Raises StateError: no tree, no such node.
        """
        with self.held():
            tree = self.tree
            if tree is None:
                raise StateError("there is no tree to select from")
            if not -1 <= node < len(tree.parents):
                raise StateError(f"the tree has no node {node}: it has {len(tree.parents)}")
            path: list[int] = []
            while node != -1:
                path.append(node)
                node = tree.parents[node]
            path.reverse()
            self._keep(path)

    def fork(self, batch: int | None = None) -> State:
        """A second state that goes its own way, with the same reach; `batch` replicates one
        sequence that many times. Raises StateError: a batch of several cannot become another.
        """
        with self.held():
            self._needs_choice("fork")
            batch = self.batch if batch is None else batch
            if batch < 1 or (batch != self.batch and self.batch != 1):
                raise StateError(f"cannot fork {self.batch} sequences into {batch}")
            return self._forked(batch)

    def spread(self, other: State) -> None:
        """Go on in `other`, a state of n times as many sequences: sequence b becomes those from
        b·n to b·n + n - 1 of it. This one stays as it is; nothing behind `other` can be rewound.

        Raises StateError: another model's, no such number of sequences, more tokens than the KV
        caches of `other` hold, a tree that waits for `select`.
        """
        with self.held(), other.held():
            self._needs_choice("spread")
            if other.identity != self.identity:
                raise StateError("the states belong to different models")
            if other.batch % self.batch:
                raise StateError(f"cannot spread {self.batch} sequences over {other.batch}")
            if self.layout.caches and self.position > other.layout.capacity:
                raise StateError(
                    f"holds {self.position} tokens, the KV caches have room for "
                    f"{other.layout.capacity}"
                )
            self._spread(other)

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
                {name: saved.tensors[name] for name in self.layout.recurrent},
                {name: saved.tensors[name] for name in self.layout.caches},
                saved.position,
            )
            return saved.extra

    # -- inside ----------------------------------------------------------------------------------

    def held(self) -> Hold:
        """Hold the state for this thread. Raises EngineError while another one does."""
        return self._hold

    def adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None:
        """Copy a whole state in; the caller holds the state and has checked where it comes from."""
        if self.layout.caches and position > self.layout.capacity:
            raise StateError(
                f"holds {position} tokens, the KV caches have room for {self.layout.capacity}"
            )
        self._adopt(recurrent, caches, position)

    def _needs_choice(self, verb: str) -> None:
        if self.tree is not None:
            raise StateError(
                f"cannot {verb}: a tree was run and no node of it selected",
                remedy="select a node first; select(-1) drops the tree",
            )

    def _copied(self, verb: str) -> Snapshot:
        self._needs_choice(verb)
        recurrent, caches = self._live()
        return Snapshot(self.identity, self.batch, self.position, recurrent, caches)

    @abstractmethod
    def _reach(self) -> int: ...

    @abstractmethod
    def _back(self, count: int) -> None:
        """`count` ≤ reach tokens ago."""

    @abstractmethod
    def _keep(self, path: list[int]) -> None:
        """Of the tree's nodes those of `path` stay."""

    @abstractmethod
    def _live(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Copies of the recurrent state, in the layout's shapes, and of the KV rows in use."""

    @abstractmethod
    def _adopt(
        self, recurrent: Mapping[str, Array], caches: Mapping[str, Array], position: int
    ) -> None: ...

    @abstractmethod
    def _forked(self, batch: int) -> State: ...

    @abstractmethod
    def _spread(self, other: State) -> None:
        """Copy what `spread` says; both are held and fit each other, but for their engines."""
