"""Where a state is: which slots hold which token's state. No memory, only numbers.

Tensors of two kinds make up a recurrent state. Most are kept for every token: a ring has a slot for
each, and going back is choosing a slot. Writing Mamba-2's scan state for every token of a run takes
longer than the rest of its scan; where it is not rounded nobody needs it. Then a run of several
tokens keeps what the scan read of each of them, a row of its logs in the token's slot, and the next
run applies the rows that are still wanted ("multi-step" of The Mamba in the Llama, arXiv
2408.15237, algorithm 2). So such states are kept for some tokens only: a base is a token whose scan
states are in memory, and the live state is the last base and the rows behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def slots_for(window: int, *, logged: bool = False) -> int:
    """Slots in the ring of a state whose runs are at most `window` tokens: 2·window + 1, or
    4·window + 1 where there are logs.

    Why this many suffice. A run of T ≤ W tokens reads the live slot and writes T neighbouring
    slots (one output of the graph is one block of memory), placed right after the live slot or,
    where they do not fit there, at slot 0. So what can be taken back always lies in at most two
    stretches: an older one ending at some slot e, and one growing from slot 0. They begin to
    exist together when T₁ tokens did not fit after e, so e ≥ slots - T₁. After c tokens have been
    written from slot 0, going back R tokens still needs the newest R + 1 - c states of the older
    stretch, whose lowest slot is e - R + c ≥ slots - T₁ - R + c; the c tokens end at slot c - 1.
    They do not meet while slots > R + T₁ - 1, and T₁ ≤ W: R + W slots are enough for that. (When
    the growing stretch itself reaches the end it is longer than R slots, and the other one is no
    longer needed.) Without logs R is W, and mostly more is intact. With them bases are kept that
    go 2·W tokens back, and a token there may need the rows of W before it: R is 3·W.

    The one slot more serves W = 1: a committing run that has to be split into single tokens
    alternates between two slots and must leave the state it started from alone until it has
    succeeded, which takes three.
    """
    return (4 if logged else 2) * window + 1


def bases_for(window: int) -> int:
    """Bases there must be memory for: at most 8, however long the window.

    Of any W tokens two are kept (`Place.with_base` drops the middle one of three that lie that
    close, unless slot 0 comes between them: two on either side), so six of the last 2·W, then the
    newest one before them, and the one that a run writes. Steps use two of them in turn, which stay
    in the cache.
    """
    return min(2 * window, 6) + 2


class Tree(NamedTuple):
    """A tree run whose path has not been chosen: its nodes fill the slots from `start` on."""

    start: int
    parents: tuple[int, ...]


class Base(NamedTuple):
    """A token whose scan states are kept: tokens consumed up to it, and where they are."""

    position: int
    slot: int


class Place(NamedTuple):
    """Everything that says where a state is. Replaced whole, so an interrupt never sees half.

    Attributes:
        window: most tokens of a run that can be taken back.
        slots: of the ring.
        position: tokens consumed.
        history: slots, oldest first, one per token since the last commit that is still intact;
            the last one is live.
        bases: oldest first; none without logs.
        tree: waits for a node to be selected, or None.
    """

    window: int
    slots: int
    position: int = 0
    history: tuple[int, ...] = (0,)
    bases: tuple[Base, ...] = ()
    tree: Tree | None = None

    @staticmethod
    def start(window: int, *, logged: bool = False) -> Place:
        """Before any token, in the first slots."""
        bases = (Base(0, 0),) if logged else ()
        return Place(window, slots_for(window, logged=logged), bases=bases)

    @property
    def live(self) -> int:
        return self.history[-1]

    @property
    def base(self) -> int:
        """Where the scan states are that the live state begins with."""
        return self.bases[-1].slot if self.bases else 0

    @property
    def pending(self) -> int:
        """Rows of the logs behind the base, in the slots up to the live one."""
        return self.position - self.bases[-1].position if self.bases else 0

    @property
    def reach(self) -> int:
        """How many tokens can be taken back: at most the window."""
        kept = len(self.history) - 1
        if self.bases:
            kept = min(kept, self.position - self.bases[0].position)
        return min(self.window, kept)

    def next_slots(self, count: int) -> int:
        """The first of `count` ≤ window neighbouring slots to write next, the live one excluded."""
        after = self.history[-1] + 1
        return after if after + count <= self.slots else 0

    def spare_slots(self) -> tuple[int, int]:
        """Two slots besides those of the live state and its pending rows."""
        return _spare(self.history[-1 - self.pending :])

    def applies_first(self, count: int, *, commit: bool, tree: bool) -> bool:
        """Whether a run of `count` tokens writes the scan states from before it, and not those
        after it: where some of it may have to be taken back, and there are rows to apply.
        """
        return self.pending > 0 and not commit and (tree or count > 1)

    def next_base(self) -> int:
        """Where scan states may be written; what is lost then, `without_base` says."""
        used = [base.slot for base in self.bases]
        slot = 0
        while slot in used:
            slot += 1
        return slot

    def spare_bases(self) -> tuple[int, int]:
        """Two places for scan states besides the one that the live state begins with."""
        return _spare([base.slot for base in self.bases[-1:]])

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
        history = history[lost + 1 :]
        # a base is of use while the rows behind it are there
        oldest = self.position - len(history)
        bases = tuple(base for base in self.bases if base.position >= oldest)
        return self._replace(history=history, bases=bases)

    def without_base(self, slot: int) -> Place:
        """The scan states there are about to be overwritten: bases from that one back are lost."""
        for index, base in enumerate(self.bases):
            if base.slot == slot:
                return self._replace(bases=self.bases[index + 1 :])
        return self

    def with_base(self, slot: int) -> Place:
        """The scan states of the live token are in `slot` too.

        The base before it goes where the one before that, at most a window ago, serves as well: the
        rows from there on have to be neighbours.
        """
        bases, position = self.bases, self.position
        if not bases or position <= bases[-1].position:
            return self
        if len(bases) > 1:
            back = position - bases[-2].position
            near = back <= self.window and back < len(self.history)
            if near and self.history[-1] - self.history[-1 - back] == back:
                bases = bases[:-1]
        return self._replace(bases=(*bases, Base(position, slot)))

    def advanced(self, start: int, count: int) -> Place:
        """The next `count` tokens are in slots start … start+count-1, already without."""
        history = (*self.history, *range(start, start + count))
        position, bases = self.position + count, self.bases
        # as many again as can be taken back at once, so that tokens can be taken back after others
        while len(bases) > 1 and bases[1].position <= position - 2 * self.window:
            bases = bases[1:]
        return Place(self.window, self.slots, position, history, bases)

    def back(self, count: int) -> Place:
        """`count` ≤ reach tokens ago."""
        history = self.history[:-count] if count else self.history
        position = self.position - count
        bases = tuple(base for base in self.bases if base.position <= position)
        return self._replace(position=position, history=history, bases=bases, tree=None)

    def settled(self, slot: int, position: int, base: int = 0) -> Place:
        """`slot` is live after `position` tokens, `base` has its scan states where there are logs,
        and nothing lies behind it.
        """
        bases = (Base(position, base),) if self.bases else ()
        return Place(self.window, self.slots, position, (slot,), bases)

    def branched(self, tree: Tree) -> Place:
        """A tree was run; one of its nodes is to be selected."""
        return self._replace(tree=tree)

    def pruned(self) -> Place:
        """The tree is forgotten."""
        return self._replace(tree=None)


def _spare(used: Sequence[int]) -> tuple[int, int]:
    free = [slot for slot in range(len(used) + 2) if slot not in used]
    return free[0], free[1]
