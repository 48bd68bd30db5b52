"""Where a state is: which slots of its memory hold which tokens. No memory, only numbers.

A state is stored after some token, and what the scans read of each token since then is kept in
logs: the pending rows, which the next run replays before its own tokens ("multi-step" of The Mamba
in the Llama, arXiv 2408.15237, algorithm 2). KV caches are written in place and go back by length.
There are two ways to keep history, with the same verbs:

    ReplayLedger   everything is stored after one token, and going back is dropping rows
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

    def back(self, count: int) -> Ledger:
        """`count` ≤ reach tokens ago."""
        ...

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Slots to copy, from and to and in this order, before nodes of the tree are `chosen`."""
        ...

    def chosen(self, path: Sequence[int]) -> Ledger:
        """The tree's nodes of `path` are kept, the others forgotten."""
        ...

    def elsewhere(self, position: int, pending: int) -> Ledger:
        """For a state after `position` tokens that is copied in, `pending` ≤ window of them rows.

        It lies in slots that the live state does not use, and nothing behind it can be taken back.
        """
        ...


def log_slots(window: int) -> int:
    """Rows of the logs, for every sequence of the batch.

    A run of T tokens after r pending ones writes T rows beside those r. Both are at most the window
    W, so 2·W rows are enough.
    """
    return 2 * window


class ReplayStep(NamedTuple):
    """What one run reads and writes.

    Attributes:
        pending: log slots to replay, oldest first.
        advance: how many of them the stored state includes, where `store` is ADVANCED.
        source: state slot to start from; `1 - source` is the one stored to.
        store: KEEP, ADVANCED or LAST.
        past: tokens before this run.
        slots: log slot of each new token, -1 for none.
        parents: of each new token for a tree, None for a chain.
        after: where the state is once the run has succeeded.
    """

    pending: tuple[int, ...]
    advance: int
    source: int
    store: int
    past: int
    slots: tuple[int, ...]
    parents: tuple[int, ...] | None
    after: ReplayLedger


class ReplayLedger(NamedTuple):
    """History as a log: a state in one of two slots, and the inputs of the tokens since.

    A recurrent state is large, what one token adds to it is small. At most W tokens are pending:
    where there would be more, the oldest are applied for good, to the other slot, which is read
    from then on. Nothing that a run reads is written by it, so a run that fails has changed
    nothing.

    Attributes:
        window: most tokens of a run that can be taken back.
        position: tokens consumed.
        source: slot of the state before the pending tokens.
        pending: log slots of the tokens since then, oldest first; at most `window`.
        tree: waits for a node to be selected, or None.
        floor: the position that cannot be gone behind, though its rows are there.
    """

    window: int
    position: int = 0
    source: int = 0
    pending: tuple[int, ...] = ()
    tree: Tree | None = None
    floor: int = 0

    @property
    def spare(self) -> int:
        """The state slot that may be written."""
        return 1 - self.source

    @property
    def reach(self) -> int:
        return min(len(self.pending), self.position - self.floor)

    @property
    def here(self) -> Slots:
        return Slots((self.source,), (self.source,), self.pending)

    @property
    def used(self) -> Slots:
        return self.here

    def run(self, count: int, *, parents: tuple[int, ...] | None = None) -> ReplayStep:
        """A run of `count` ≤ window tokens, all of which can be taken back."""
        slots = self._free_rows(count)
        tree = None if parents is None else Tree(parents, slots)
        # of a tree only one path will be kept
        kept = count if tree is None else tree.depth
        advance = max(0, len(self.pending) + kept - self.window)
        after = self._replace(
            source=self.spare if advance else self.source,
            pending=self.pending[advance:] + (slots if tree is None else ()),
            position=self.position + (count if tree is None else 0),
            tree=tree,
        )
        store = ADVANCED if advance else KEEP
        return ReplayStep(
            self.pending, advance, self.source, store, self.position, slots, parents, after
        )

    def _free_rows(self, count: int) -> tuple[int, ...]:
        used = set(self.pending)
        free = [slot for slot in range(log_slots(self.window)) if slot not in used]
        return tuple(free[:count])

    def commit(self, count: int) -> ReplayStep:
        """A run of any number of tokens, of which only the state after the last is kept."""
        after = ReplayLedger(self.window, self.position + count, self.spare)
        slots = (-1,) * count
        return ReplayStep(self.pending, 0, self.source, LAST, self.position, slots, None, after)

    def applied(self) -> ReplayStep:
        """No token: the live state is written to the spare slot. It stays where it was too."""
        return ReplayStep(self.pending, 0, self.source, LAST, self.position, (), None, self)

    def back(self, count: int) -> ReplayLedger:
        """See `Ledger`."""
        pending = self.pending[: len(self.pending) - count]
        return self._replace(position=self.position - count, pending=pending)

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Rows are read in any order: they stay where they are."""
        return []

    def chosen(self, path: Sequence[int]) -> ReplayLedger:
        """See `Ledger`."""
        slots = () if self.tree is None else tuple(self.tree.slots[node] for node in path)
        return self._replace(
            position=self.position + len(path), pending=self.pending + slots, tree=None
        )

    def elsewhere(self, position: int, pending: int) -> ReplayLedger:
        """See `Ledger`."""
        rows = self._free_rows(pending)
        return ReplayLedger(self.window, position, self.spare, rows, floor=position)
