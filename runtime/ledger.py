"""Ledgers: which slots of a state's memory hold which tokens. Only numbers, no tensors.

A state is stored after some token. The scan inputs of each later token are kept in logs as pending
rows, which the next run replays before its own tokens ("multi-step" of The Mamba in the Llama,
arXiv 2408.15237, algorithm 2). KV caches are written in place and rewound by length. There are two
kinds of history, with the same interface:

    ReplayLedger   everything is stored at a few tokens, and a rewind drops rows
    RingLedger     (edge.runtime.ring) most tensors have a slot for every token, and a rewind
                   chooses a slot

A ledger is an immutable value. A run is planned as a step, which says what the run reads and writes
and holds the ledger afterwards. The state's ledger is replaced as a whole, so an interrupt never
sees a partial update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

KEEP, ADVANCED, LAST = range(3)  # values of the kernels' input run[STORE]


class Tree(NamedTuple):
    """A tree run whose path has not been selected yet: parents and slots of its nodes."""

    parents: tuple[int, ...]
    slots: Sequence[int]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`; empty for -1."""
        nodes: list[int] = []
        while node != -1:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    @property
    def depth(self) -> int:
        """Number of nodes on the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)


class Slots(NamedTuple):
    """Slots of the three kinds of tensors.

    Attributes:
        kept: slots of recurrent tensors.
        based: slots of recurrent tensors that are stored only at some tokens.
        rows: log slots, oldest first.
    """

    kept: Sequence[int]
    based: Sequence[int]
    rows: Sequence[int]


class Ledger(Protocol):
    """The interface of ledgers, independent of how history is kept.

    Attributes:
        window: maximum number of tokens that can be rewound.
        position: number of tokens consumed.
        tree: the tree that waits for a node to be selected, or None.
        reach: number of tokens that can be rewound now, at most the window.
        pending: log rows to replay, oldest first.
        here: slots of the live state.
        used: slots of the live state and of every state that a rewind can reach.
        first: position stored in the first slot of sliding caches.
    """

    @property
    def window(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def tree(self) -> Tree | None: ...

    @property
    def reach(self) -> int: ...

    @property
    def pending(self) -> Sequence[int]: ...

    @property
    def here(self) -> Slots: ...

    @property
    def used(self) -> Slots: ...

    @property
    def first(self) -> int: ...

    def sliding_from(self, first: int) -> Ledger:
        """Return the ledger after sliding caches have moved to begin at position `first`."""
        ...

    def back(self, count: int) -> Ledger:
        """Return the ledger of `count` ≤ reach tokens ago."""
        ...

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Return (from, to) slots to copy, in this order, before nodes of the tree are `chosen`."""
        ...

    def chosen(self, path: Sequence[int]) -> Ledger:
        """Return the ledger with the tree's nodes on `path` kept and the others dropped."""
        ...

    def with_room(self, count: int) -> Ledger:
        """Return the ledger with a free slot and room for `count` ≤ window log rows.

        The reach may shrink. Must be called before the state's memory is written.
        """
        ...

    def elsewhere(self, position: int, pending: int) -> Ledger:
        """Return the ledger for copying in a state of `position` tokens, `pending` of them rows.

        It uses slots that the live state does not use, and cannot be rewound. There must be room.
        """
        ...


def state_slots(window: int) -> int:
    """Return the number of state slots with which steps replay nothing.

    They hold the newest state, one that is one to two windows old, one between them that will take
    its place, and one to write to.
    """
    return min(4, window + 2)


def log_slots(window: int) -> int:
    """Return the number of log rows for each sequence of the batch.

    A run of T tokens after r pending ones writes T rows beside those r. Both are at most the window
    W, so 2·W rows suffice; unused ones extend the reach.
    """
    return 2 * window


class ReplayStep(NamedTuple):
    """What one run reads and writes.

    Attributes:
        pending: log slots to replay, oldest first.
        advance: number of pending rows included in the stored state if `store` is ADVANCED.
        source, target: state slots to start from and to store to.
        store: KEEP, ADVANCED or LAST.
        past: number of tokens before this run.
        slots: log slot of each new token, -1 for none.
        parents: parent of each new token in a tree; None for a chain.
        after: ledger once the run has succeeded.
    """

    pending: tuple[int, ...]
    advance: int
    source: int
    target: int
    store: int
    past: int
    slots: tuple[int, ...]
    parents: tuple[int, ...] | None
    after: ReplayLedger


class Anchor(NamedTuple):
    """A stored state: its slot, and the number of tokens before it."""

    slot: int
    position: int


class ReplayLedger(NamedTuple):
    """History as a log: a few stored states, and the scan inputs of tokens since the oldest one.

    A run starts from the newest stored state and replays the rows since then. Given enough slots, a
    step stores the state after its token, so that the next step replays nothing. So does a longer
    run that replays nothing, or that follows a run of which nothing was rewound, because it is then
    likely to be kept whole too. Any other run stores the state before its first token, which
    survives every rewind. Older states serve rewinds only. With two slots there is one stored
    state, a window behind.

    A run writes nothing that it reads or that a rewind can reach, so a failed run changes nothing.

    Attributes:
        window: maximum number of tokens that can be rewound.
        slots: number of slots for stored states; one of them is free while rows are pending.
        position: number of tokens consumed.
        anchors: the stored states, oldest first; at least one.
        rows: log slots of the tokens since the oldest anchor, oldest first.
        tree: the tree that waits for a node to be selected, or None.
        floor: position that a rewind cannot cross, even if its rows are there.
        whole: whether nothing of the last run was rewound.
        first: see `Ledger`.
    """

    window: int
    slots: int = 2
    position: int = 0
    anchors: tuple[Anchor, ...] = (Anchor(0, 0),)
    rows: tuple[int, ...] = ()
    tree: Tree | None = None
    floor: int = 0
    whole: bool = False
    first: int = 0

    @property
    def source(self) -> int:
        """Slot that the next run starts from."""
        return self.anchors[-1].slot

    @property
    def spare(self) -> int:
        """State slot that may be written; `with_room` frees one."""
        used = {anchor.slot for anchor in self.anchors}
        return next(slot for slot in range(self.slots) if slot not in used)

    @property
    def pending(self) -> tuple[int, ...]:
        return self.rows[self.anchors[-1].position - self.anchors[0].position :]

    @property
    def reach(self) -> int:
        return min(len(self.rows), self.position - self.floor, self.window)

    @property
    def here(self) -> Slots:
        return Slots((self.source,), (self.source,), self.pending)

    @property
    def used(self) -> Slots:
        slots = tuple(anchor.slot for anchor in self.anchors)
        return Slots(slots, slots, self.rows)

    def with_room(self, count: int) -> ReplayLedger:
        ledger = self
        while len(ledger.rows) + count > log_slots(self.window) and len(ledger.anchors) > 1:
            ledger = ledger._without_oldest()
        return ledger._with_spare()

    def _with_spare(self) -> ReplayLedger:
        if len(self.anchors) < self.slots:
            return self
        return self._replace(anchors=(*self.anchors[:-2], self.anchors[-1]))

    def _without_oldest(self) -> ReplayLedger:
        first, second = self.anchors[:2]
        return self._replace(
            anchors=self.anchors[1:], rows=self.rows[second.position - first.position :]
        )

    def run(self, count: int, *, parents: tuple[int, ...] | None = None) -> ReplayStep:
        """Plan a run of `count` ≤ window tokens that can all be rewound. There must be room."""
        slots = self._free_rows(count)
        tree = None if parents is None else Tree(parents, slots)
        # only one path of a tree will be kept
        kept = count if tree is None else tree.depth
        after = self._replace(
            rows=self.rows + (slots if tree is None else ()),
            position=self.position + (count if tree is None else 0),
            tree=tree,
            whole=tree is None,
        )
        store, advance, target = KEEP, 0, self.spare
        stored = self._store_position(kept, chain=tree is None)
        if stored > self.anchors[-1].position:
            store, advance = ADVANCED, stored - self.anchors[-1].position
            if stored > self.position:
                store, advance = LAST, 0
            after = after._replace(anchors=(*self.anchors, Anchor(target, stored)))
        after = after._thinned(self.position + kept)
        if store != LAST:  # with LAST the state before the run is kept until the next run
            after = after._with_spare()
        return ReplayStep(
            self.pending, advance, self.source, target, store, self.position, slots, parents, after
        )

    def _store_position(self, kept: int, *, chain: bool) -> int:
        """Return the position at which a run stores the state, unless it is already stored."""
        if self.slots == 2:
            return self.position + kept - self.window
        pending = len(self.pending)
        likely = kept == 1 or not pending or self.whole
        # then at most a window of rows is pending after any rewind
        last = chain and likely and pending + kept <= self.window + 1
        return self.position + kept if last else self.position

    def _thinned(self, end: int) -> ReplayLedger:
        """Drop anchors that only serve rewinds of more than a window from `end`."""
        ledger = self
        while len(ledger.anchors) > 1 and end >= ledger.anchors[1].position + self.window:
            ledger = ledger._without_oldest()
        return ledger

    def _free_rows(self, count: int) -> tuple[int, ...]:
        used = set(self.rows)
        free = [slot for slot in range(log_slots(self.window)) if slot not in used]
        return tuple(free[:count])

    def commit(self, count: int) -> ReplayStep:
        """Plan a run of any number of tokens that keeps only the state after the last."""
        end = self.position + count
        anchors = (Anchor(self.spare, end),)
        after = ReplayLedger(self.window, self.slots, end, anchors, first=self.first)
        slots = (-1,) * count
        return ReplayStep(
            self.pending, 0, self.source, self.spare, LAST, self.position, slots, None, after
        )

    def applied(self) -> ReplayStep:
        """Plan a run without tokens that writes the live state to the spare slot.

        There is a spare slot while rows are pending. The ledger stays the same.
        """
        return ReplayStep(
            self.pending, 0, self.source, self.spare, LAST, self.position, (), None, self
        )

    def back(self, count: int) -> ReplayLedger:
        position = self.position - count
        anchors = tuple(anchor for anchor in self.anchors if anchor.position <= position)
        rows = self.rows[: len(self.rows) - count]
        whole = self.whole and not count
        return self._replace(position=position, anchors=anchors, rows=rows, whole=whole)

    def sliding_from(self, first: int) -> ReplayLedger:
        return self._replace(first=first)

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Move nothing: rows may be read in any order."""
        return []

    def chosen(self, path: Sequence[int]) -> ReplayLedger:
        slots = () if self.tree is None else tuple(self.tree.slots[node] for node in path)
        return self._replace(position=self.position + len(path), rows=self.rows + slots, tree=None)

    def elsewhere(self, position: int, pending: int) -> ReplayLedger:
        anchors, rows = (Anchor(self.spare, position - pending),), self._free_rows(pending)
        return ReplayLedger(self.window, self.slots, position, anchors, rows, floor=position)
