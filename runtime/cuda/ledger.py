"""Where a state on a device is: which slots and log rows hold it. No memory, only numbers.

A recurrent state is large, what one token adds to it is small. So the device keeps the state after
some token, in one of two slots, and for every token since then its inputs, a row of the logs; a run
replays those, then runs its own ("multi-step" of The Mamba in the Llama, arXiv 2408.15237,
algorithm 2). Going back is dropping rows. KV caches are written in place and go back by length.

A run of T tokens after r pending ones writes T rows of the log beside those r. As both are at most
the window W, 2·W rows are enough. It leaves at most W tokens pending: where there would be more,
the oldest are applied for good, to the other slot, which is read from then on. Nothing that a run
reads is written by it, so a run that fails has changed nothing.
"""

from __future__ import annotations

from typing import NamedTuple

KEEP, ADVANCED, LAST = range(3)  # values of the input run[STORE]


def log_slots(window: int) -> int:
    """Rows of the logs, for every sequence of the batch."""
    return 2 * window


class Step(NamedTuple):
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
    after: Ledger


class Tree(NamedTuple):
    """A tree run whose path has not been chosen: parents and log slots of its nodes."""

    parents: tuple[int, ...]
    slots: tuple[int, ...]

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


class Ledger(NamedTuple):
    """Everything that says where a state is. Replaced whole, so an interrupt never sees half.

    Attributes:
        window: most tokens of a run that can be taken back.
        position: tokens consumed.
        source: slot of the state before the pending tokens.
        pending: log slots of the tokens since then, oldest first; at most `window`.
        tree: waits for a node to be selected, or None.
    """

    window: int
    position: int = 0
    source: int = 0
    pending: tuple[int, ...] = ()
    tree: Tree | None = None

    @property
    def spare(self) -> int:
        """The state slot that may be written."""
        return 1 - self.source

    @property
    def reach(self) -> int:
        """How many tokens can be taken back."""
        return len(self.pending)

    def run(self, count: int, *, parents: tuple[int, ...] | None = None) -> Step:
        """A run of `count` ≤ window tokens, all of which can be taken back."""
        used = set(self.pending)
        free = [slot for slot in range(log_slots(self.window)) if slot not in used]
        slots = tuple(free[:count])
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
        return Step(self.pending, advance, self.source, store, self.position, slots, parents, after)

    def commit(self, count: int) -> Step:
        """A run of any number of tokens, of which only the state after the last is kept."""
        after = self.settled(self.position + count)
        slots = (-1,) * count
        return Step(self.pending, 0, self.source, LAST, self.position, slots, None, after)

    def settle(self) -> Step:
        """No token: the live state is written to the spare slot. It stays where it was too."""
        return Step(self.pending, 0, self.source, LAST, self.position, (), None, self)

    def rehearsal(self, count: int, *, tree: bool) -> Step:
        """A run that stores nothing and leaves the state where it is; of `tree`, a fan of roots.

        It writes rows of the KV caches from `position` on, as every run does.
        """
        slots, parents = (-1,) * count, (-1,) * count if tree else None
        return Step((), 0, self.source, KEEP, self.position, slots, parents, self)

    def back(self, count: int) -> Ledger:
        """`count` ≤ reach tokens ago."""
        pending = self.pending[: len(self.pending) - count]
        return self._replace(position=self.position - count, pending=pending)

    def settled(self, position: int) -> Ledger:
        """The spare slot is live after `position` tokens and nothing lies behind it."""
        return Ledger(self.window, position, self.spare)

    def chosen(self, path: tuple[int, ...]) -> Ledger:
        """Of the tree's nodes those of `path` are kept."""
        slots = () if self.tree is None else tuple(self.tree.slots[node] for node in path)
        return self._replace(
            position=self.position + len(path), pending=self.pending + slots, tree=None
        )
