"""Where a state is: which slot of its ring holds which token's state. No memory, only numbers."""

from __future__ import annotations

from typing import NamedTuple


def slots_for(window: int) -> int:
    """Slots in the ring of a state whose runs are at most `window` tokens: 2·window + 1.

    Why this many suffice. A run of T ≤ W tokens reads the live slot and writes T neighbouring
    slots (one output of the graph is one block of memory), placed right after the live slot or,
    where they do not fit there, at slot 0. So what can be taken back always lies in at most two
    stretches: an older one ending at some slot e, and one growing from slot 0. They begin to
    exist together when T₁ tokens did not fit after e, so e ≥ slots - T₁. After c tokens have been
    written from slot 0, rewinding W tokens still needs the newest W + 1 - c states of the older
    stretch, whose lowest slot is e - W + c ≥ slots - T₁ - W + c; the c tokens end at slot c - 1.
    They do not meet while slots > W + T₁ - 1, and T₁ ≤ W: 2·W slots are enough for that. (When
    the growing stretch itself reaches the end it is longer than W slots, and the other one is no
    longer needed.)

    The one slot more serves W = 1: a committing run that has to be split into single tokens
    alternates between two slots and must leave the state it started from alone until it has
    succeeded, which takes three.
    """
    return 2 * window + 1


class Tree(NamedTuple):
    """A tree run whose path has not been chosen: its nodes fill the slots from `start` on."""

    start: int
    parents: tuple[int, ...]


class Place(NamedTuple):
    """Everything that says where a state is. Replaced whole, so an interrupt never sees half.

    Attributes:
        window: most tokens of a run that can be taken back.
        position: tokens consumed.
        history: slots, oldest first, one per token since the last commit that is still intact;
            the last one is live.
        tree: waits for a node to be selected, or None.
    """

    window: int
    position: int = 0
    history: tuple[int, ...] = (0,)
    tree: Tree | None = None

    @property
    def live(self) -> int:
        return self.history[-1]

    @property
    def reach(self) -> int:
        """How many tokens can be taken back: at most the window."""
        return min(self.window, len(self.history) - 1)

    def next_slots(self, count: int) -> int:
        """The first of `count` ≤ window neighbouring slots to write next, the live one excluded."""
        after = self.history[-1] + 1
        return after if after + count <= slots_for(self.window) else 0

    def spare_slots(self) -> tuple[int, int]:
        """Two slots besides the live one."""
        live = self.history[-1]
        return (1, 2) if live == 0 else (0, 2) if live == 1 else (0, 1)

    def without(self, start: int, count: int) -> Place:
        """Slots start … start+count-1 are about to be overwritten: nothing at or before them can
        be gone back to.
        """
        history = self.history
        lost = -1
        for slot in range(start, start + count):
            if slot in history:
                lost = max(lost, history.index(slot))
        if lost < 0:
            return self
        return Place(self.window, self.position, history[lost + 1 :], self.tree)

    def advanced(self, start: int, count: int) -> Place:
        """The next `count` tokens' states are in slots start … start+count-1, already without."""
        history = (*self.history, *range(start, start + count))
        return Place(self.window, self.position + count, history)

    def back(self, count: int) -> Place:
        """`count` ≤ reach tokens ago."""
        history = self.history[:-count] if count else self.history
        return Place(self.window, self.position - count, history)

    def settled(self, slot: int, position: int) -> Place:
        """`slot` is live after `position` tokens and nothing lies behind it."""
        return Place(self.window, position, (slot,))

    def branched(self, tree: Tree) -> Place:
        """A tree was run; one of its nodes is to be selected."""
        return Place(self.window, self.position, self.history, tree)

    def pruned(self) -> Place:
        """The tree is forgotten."""
        return Place(self.window, self.position, self.history)
