"""The memory of a state, as slots of tensors in any kind of memory, and snapshots of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edge.runtime.layout import Identity, StateLayout
from edge.runtime.ledger import Ledger, Slots

Array = NDArray[Any]
# a tensor's name, a slot, and the array to copy from or to
Piece = tuple[str, int, Array]


@dataclass(frozen=True)
class Snapshot:
    """A copy of the live state: one recurrent state, its pending log rows and the KV rows in use.

    Attributes:
        identity: identity of the model that the state belongs to.
        batch: number of sequences.
        position: number of tokens consumed.
        recurrent: input name → recurrent state, before the pending tokens.
        caches: input name → KV rows of all tokens, or of those that the next one may attend to.
        rows: log name → [P, B, width] of the P pending tokens; empty if none is pending.
        nbytes: bytes of memory it holds.
    """

    identity: Identity
    batch: int
    position: int
    recurrent: Mapping[str, Array]
    caches: Mapping[str, Array]
    rows: Mapping[str, Array]

    @property
    def pending(self) -> int:
        """Number of pending tokens, which are in `rows` but not in `recurrent`."""
        return max((len(rows) for rows in self.rows.values()), default=0)

    @property
    def nbytes(self) -> int:
        arrays = (*self.recurrent.values(), *self.caches.values(), *self.rows.values())
        return sum(array.nbytes for array in arrays)


class StateMemory(ABC):
    """The tensors of one state, accessed by slot.

    Attributes:
        layout: names, shapes and dtypes of the tensors.
        ledger: which slots hold which tokens.
    """

    ledger: Ledger

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self._based = layout.based

    @abstractmethod
    def _zero(self, slots: Iterable[tuple[str, int]]) -> None:
        """Fill these (tensor, slot) pairs with zeros."""

    @abstractmethod
    def _read(self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int) -> None:
        """Fill the arrays from slots, and those of `caches` from the KV rows that precede `end`."""

    @abstractmethod
    def _write(
        self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int, first: int
    ) -> None:
        """Copy the arrays into slots, and those of `caches` into the KV rows that precede `end`.

        Sliding caches begin at position `first` afterwards.
        """

    @abstractmethod
    def _move(self, slots: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Copy slots of all recurrent tensors and logs, and KV rows by position: (from, to)."""

    @abstractmethod
    def _slide(self, count: int, to: int) -> None:
        """Copy `count` KV rows of sliding caches, from position `to` on, to the caches' start."""

    @abstractmethod
    def _same_memory(self, other: StateMemory) -> bool:
        """Return whether `_take` can copy between the two."""

    @abstractmethod
    def _take(
        self, source: StateMemory, slots: Iterable[tuple[str, int, int]], length: int, first: int
    ) -> None:
        """Copy slots (name, from, to) and the KV rows of `length` tokens from `source`.

        Each of its sequences is replicated to fill this state's batch. Sliding caches begin at
        position `first` afterwards; rows that the source has dropped are not copied.
        """

    def _first(self, name: str, first: int | None = None) -> int:
        """Return the position in a cache's first slot: `first` or the ledger's if it slides."""
        if not self.layout.slides(name):
            return 0
        return self.ledger.first if first is None else first

    def _slot(self, name: str, slots: Slots) -> int:
        return (slots.based if name in self._based else slots.kept)[0]

    def _pieces(
        self, slots: Slots, recurrent: Mapping[str, Array], rows: Mapping[str, Array]
    ) -> Iterator[Piece]:
        for name in self.layout.recurrent:
            yield name, self._slot(name, slots), recurrent[name]
        for name, array in rows.items():
            for slot, row in zip(slots.rows, array, strict=True):
                yield name, slot, row

    def _pairs(self, start: Slots, to: Slots) -> Iterator[tuple[str, int, int]]:
        """Yield (tensor, slot of this state, slot of the state it is copied to)."""
        for name in (*self.layout.recurrent, *self.layout.logs):
            kind = 2 if name in self.layout.logs else 1 if name in self._based else 0
            for source, target in zip(start[kind], to[kind], strict=True):
                yield name, source, target
