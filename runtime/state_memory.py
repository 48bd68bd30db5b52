"""What a state is kept in: slots of tensors, whatever memory they are in, and a copy of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from edge.runtime.layout import Identity, StateLayout
from edge.runtime.ledger import Ledger, Slots

Array = NDArray[Any]
# one slot of a tensor, and what it holds or is to hold
Piece = tuple[str, int, Array]


@dataclass(frozen=True)
class Snapshot:
    """A copy of the live state: one recurrent state, the log rows pending since, and the KV rows
    in use.

    Attributes:
        position: tokens consumed.
        caches: KV rows of the last tokens: of all of them, or of those that the next one may look
            back on.
        rows: log name → [P, B, width] of the P pending tokens; empty where nothing is pending.
        nbytes: memory it holds, bytes.
    """

    identity: Identity
    batch: int
    position: int
    recurrent: Mapping[str, Array]
    caches: Mapping[str, Array]
    rows: Mapping[str, Array]

    @property
    def pending(self) -> int:
        """Tokens that `recurrent` lacks and `rows` have."""
        return max((len(rows) for rows in self.rows.values()), default=0)

    @property
    def nbytes(self) -> int:
        arrays = (*self.recurrent.values(), *self.caches.values(), *self.rows.values())
        return sum(array.nbytes for array in arrays)


class StateMemory(ABC):
    """The tensors of one state, a slot at a time.

    Attributes:
        layout: names, shapes and types of them.
        ledger: which slots hold which tokens.
    """

    ledger: Ledger

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self._based = layout.based

    @abstractmethod
    def _zero(self, slots: Iterable[tuple[str, int]]) -> None:
        """Fill these slots of tensors with zeros."""

    @abstractmethod
    def _read(self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int) -> None:
        """Fill the arrays from slots, those of `caches` from the KV rows of as many positions
        before `end`.
        """

    @abstractmethod
    def _write(
        self, pieces: Iterable[Piece], caches: Mapping[str, Array], end: int, first: int
    ) -> None:
        """Copy the arrays into slots, those of `caches` into the KV rows of as many positions
        before `end`; caches that slide begin with position `first` then.
        """

    @abstractmethod
    def _move(self, slots: list[tuple[int, int]], rows: list[tuple[int, int]]) -> None:
        """Copy slots of all recurrent tensors and logs, and KV rows: from a position, to one."""

    @abstractmethod
    def _slide(self, count: int, to: int) -> None:
        """Copy the first `count` KV rows from position `to` on, of caches that slide, to where they
        begin.
        """

    @abstractmethod
    def _same_memory(self, other: StateMemory) -> bool:
        """Whether `_take` can copy between them."""

    @abstractmethod
    def _take(
        self, source: StateMemory, slots: Iterable[tuple[str, int, int]], length: int, first: int
    ) -> None:
        """Copy slots of tensors (name, from, to) and the KV rows of `length` tokens from `source`,
        each of its sequences as often as this state has more of them. Caches that slide begin with
        position `first` then; of those of the source, what they have no longer is not copied.
        """

    def _first(self, name: str, first: int | None = None) -> int:
        """The position in the first slot of a cache, if it slides the ledger's or that given."""
        if not self.layout.slides(name):
            return 0
        return self.ledger.first if first is None else first

    def _slot(self, name: str, here: Slots) -> int:
        return (here.based if name in self._based else here.kept)[0]

    def _pieces(
        self, here: Slots, recurrent: Mapping[str, Array], rows: Mapping[str, Array]
    ) -> Iterator[Piece]:
        for name in self.layout.recurrent:
            yield name, self._slot(name, here), recurrent[name]
        for name, array in rows.items():
            for slot, row in zip(here.rows, array, strict=True):
                yield name, slot, row

    def _pairs(self, start: Slots, to: Slots) -> Iterator[tuple[str, int, int]]:
        """(tensor, slot of this state, slot of the one that it is copied to)."""
        for name in (*self.layout.recurrent, *self.layout.logs):
            kind = 2 if name in self.layout.logs else 1 if name in self._based else 0
            for source, target in zip(start[kind], to[kind], strict=True):
                yield name, source, target
