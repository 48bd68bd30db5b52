"""The place of a state: which slots of its memory hold which tokens. No memory, only numbers.

A state is stored after some token, and what the scans read of each token since then is kept in
logs: the pending rows, which the next run replays before its own tokens ("multi-step" of The Mamba
in the Llama, arXiv 2408.15237, algorithm 2). KV caches are written in place and go back by length.
There are two ways to keep history, with the same verbs:

    ReplayLedger   everything is stored after a few tokens, and going back is dropping rows
    RingLedger     (edge.runtime.ring) most tensors have a slot for every token, and going back is
                   choosing a slot

A ledger is a value. A run makes a `Step`, which says what it reads and writes and where the state
is afterwards; the state's ledger is replaced whole, so an interrupt never sees half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

KEEP, ADVANCED, LAST = range(3)  # values of the input run[STORE]


class Tree(NamedTuple):
    """A tree run whose path has not been chosen: parents and slots of its nodes."""

    parents: tuple[int, ...]
    slots: Sequence[int]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`; none for -1."""
        nodes: list[int] = []
        while node != -1:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    @property
    def depth(self) -> int:
        """Nodes of the longest path."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)


class Slots(NamedTuple):
    """Slots of the three kinds of tensors.

    Attributes:
        kept: of recurrent tensors.
        based: of those that are stored for some tokens only.
        rows: of the logs, oldest first.
    """

    kept: Sequence[int]
    based: Sequence[int]
    rows: Sequence[int]


class Ledger(Protocol):
    """What a state asks of its ledger, whichever way history is kept.

    Attributes:
        window: most tokens of a run that can be taken back.
        position: tokens consumed.
        tree: waits for a node to be selected, or None.
        reach: how many tokens can be taken back, at most the window.
        pending: log rows to replay, oldest first.
        here: what the live state consists of.
        used: the same, and everything that can be gone back to.
        first: the position in the first slot of caches that slide.
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
        """The same, with caches that slide moved."""
        ...

    def back(self, count: int) -> Ledger:
        """`count` ≤ reach tokens ago."""
        ...

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Slots to copy, from and to and in this order, before nodes of the tree are `chosen`."""
        ...

    def chosen(self, path: Sequence[int]) -> Ledger:
        """The tree's nodes of `path` are kept, the others forgotten."""
        ...

    def with_room(self, count: int) -> Ledger:
        """The same state with a free slot and room for `count` ≤ window log rows, though it may
        reach less far. So is every state before its memory is written.
        """
        ...

    def elsewhere(self, position: int, pending: int) -> Ledger:
        """The ledger of a state after `position` tokens that is copied in, `pending` of them rows;
        there is room.

        It lies in slots that the live state does not use, and nothing behind it can be taken back.
        """
        ...


def state_slots(window: int) -> int:
    """Slots in which steps replay nothing: for the newest state, one a window behind or up to two,
    one between them that takes its place, and one to write to.
    """
    return min(4, window + 2)


def log_slots(window: int) -> int:
    """Rows of the logs, for every sequence of the batch.

    A run of T tokens after r pending ones writes T rows beside those r. Both are at most the window
    W, so 2·W rows are enough; what is left of them is for going back.
    """
    return 2 * window


class ReplayStep(NamedTuple):
    """What one run reads and writes.

    Attributes:
        pending: log slots to replay, oldest first.
        advance: how many of them the stored state includes, where `store` is ADVANCED.
        source, target: state slots to start from, and to store to.
        store: KEEP, ADVANCED or LAST.
        past: tokens before this run.
        slots: log slot of each new token, -1 for none.
        parents: of each new token for a tree, None for a chain.
        after: where the state is once the run has succeeded.
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
    """A stored state: its slot, and the tokens before it."""

    slot: int
    position: int


class ReplayLedger(NamedTuple):
    """History as a log: a few stored states, and the inputs of the tokens since the first of them.

    A run starts from the newest stored state and replays what came since. Where there are slots
    enough, a step stores the state after its token, so that the next one replays nothing. So does a
    longer run that replays nothing, or follows one of which nothing was taken back: the next is
    likely to be kept whole too. Another one stores the state before its first token, which stays
    whatever is taken back. States further back are kept for going back alone. With two slots there
    is one stored state, a window behind.

    Nothing that a run reads, and nothing that can be gone back to, is written by it, so a run that
    fails has changed nothing.

    Attributes:
        window: most tokens of a run that can be taken back.
        slots: of stored states; one of them is free while rows are pending.
        position: tokens consumed.
        anchors: the stored states, oldest first; never without one.
        rows: log slots of the tokens since the first, oldest first.
        tree: waits for a node to be selected, or None.
        floor: the position that cannot be gone behind, though its rows are there.
        whole: nothing was taken back of the last run.
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
        """The slot that the next run starts from."""
        return self.anchors[-1].slot

    @property
    def spare(self) -> int:
        """The state slot that may be written; `with_room` frees one."""
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
        found = self
        while len(found.rows) + count > log_slots(self.window) and len(found.anchors) > 1:
            found = found._without_first()
        return found._with_spare()

    def _with_spare(self) -> ReplayLedger:
        if len(self.anchors) < self.slots:
            return self
        return self._replace(anchors=(*self.anchors[:-2], self.anchors[-1]))

    def _without_first(self) -> ReplayLedger:
        first, second = self.anchors[:2]
        return self._replace(
            anchors=self.anchors[1:], rows=self.rows[second.position - first.position :]
        )

    def run(self, count: int, *, parents: tuple[int, ...] | None = None) -> ReplayStep:
        """A run of `count` ≤ window tokens, all of which can be taken back; there is room."""
        slots = self._free_rows(count)
        tree = None if parents is None else Tree(parents, slots)
        # of a tree only one path will be kept
        kept = count if tree is None else tree.depth
        after = self._replace(
            rows=self.rows + (slots if tree is None else ()),
            position=self.position + (count if tree is None else 0),
            tree=tree,
            whole=tree is None,
        )
        store, advance, target = KEEP, 0, self.spare
        stored = self._stored(kept, chain=tree is None)
        if stored > self.anchors[-1].position:
            store, advance = ADVANCED, stored - self.anchors[-1].position
            if stored > self.position:
                store, advance = LAST, 0
            after = after._replace(anchors=(*self.anchors, Anchor(target, stored)))
        after = after._thinned(self.position + kept)
        if store != LAST:  # else the state before the run is kept until the next one
            after = after._with_spare()
        return ReplayStep(
            self.pending, advance, self.source, target, store, self.position, slots, parents, after
        )

    def _stored(self, kept: int, *, chain: bool) -> int:
        """The position after which a run stores the state, unless it is there."""
        if self.slots == 2:
            return self.position + kept - self.window
        pending = len(self.pending)
        likely = kept == 1 or not pending or self.whole
        # whatever is taken back, at most a window is pending then
        last = chain and likely and pending + kept <= self.window + 1
        return self.position + kept if last else self.position

    def _thinned(self, end: int) -> ReplayLedger:
        """Drop what goes back by more than a window from `end`."""
        found = self
        while len(found.anchors) > 1 and end >= found.anchors[1].position + self.window:
            found = found._without_first()
        return found

    def _free_rows(self, count: int) -> tuple[int, ...]:
        used = set(self.rows)
        free = [slot for slot in range(log_slots(self.window)) if slot not in used]
        return tuple(free[:count])

    def commit(self, count: int) -> ReplayStep:
        """A run of any number of tokens, of which only the state after the last is kept."""
        end = self.position + count
        anchors = (Anchor(self.spare, end),)
        after = ReplayLedger(self.window, self.slots, end, anchors, first=self.first)
        slots = (-1,) * count
        return ReplayStep(
            self.pending, 0, self.source, self.spare, LAST, self.position, slots, None, after
        )

    def applied(self) -> ReplayStep:
        """No token: the live state is written to the spare slot, which there is while rows are
        pending. It stays where it was too.
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
        """Rows are read in any order: they stay where they are."""
        return []

    def chosen(self, path: Sequence[int]) -> ReplayLedger:
        slots = () if self.tree is None else tuple(self.tree.slots[node] for node in path)
        return self._replace(position=self.position + len(path), rows=self.rows + slots, tree=None)

    def elsewhere(self, position: int, pending: int) -> ReplayLedger:
        anchors, rows = (Anchor(self.spare, position - pending),), self._free_rows(pending)
        return ReplayLedger(self.window, self.slots, position, anchors, rows, floor=position)
