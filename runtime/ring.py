"""History as slots of a ring, one for every token: going back is choosing a slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge.runtime.ledger import Slots, Tree


def ring_slots(window: int, *, logged: bool = False) -> int:
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
    succeeded, which takes three. It is also enough for a state that is copied in beside the live
    one: of the 3·W slots that the live one and its rows leave free, W are neighbours.
    """
    return (4 if logged else 2) * window + 1


def ring_bases(window: int) -> int:
    """Bases there must be memory for: at most 8, however long the window.

    Of any W tokens two are kept (`RingLedger.with_base` drops the middle one of three that lie that
    close, unless slot 0 comes between them: two on either side), so six of the last 2·W, then the
    newest one before them, and the one that a run writes. Steps use two of them in turn, which stay
    in the cache.
    """
    return min(2 * window, 6) + 2


class Base(NamedTuple):
    """A token whose based tensors are stored: tokens consumed up to it, and where they are."""

    position: int
    slot: int


class RingRun(NamedTuple):
    """What tells one run's buffers from another's.

    Attributes:
        source, target: slots, of the state read and of the first token written.
        base, new_base: where based tensors are read and written.
        pending: rows of the logs, up to the source's.
        stored: the token, pending ones counted first, after which based tensors are written.
        tokens: of the run.
        commit: only the last token is kept.
        tree: the run is a tree.
    """

    source: int
    target: int
    base: int
    new_base: int
    pending: int
    stored: int
    tokens: int
    commit: bool
    tree: bool


class RingStep(NamedTuple):
    """One run: what it reads and writes.

    Attributes:
        run: in numbers.
        during: where the state is from the moment the run starts, and stays if it fails: what the
            run overwrites cannot be gone back to.
        after: where the state is once the run has succeeded.
    """

    run: RingRun
    during: RingLedger
    after: RingLedger


class RingLedger(NamedTuple):
    """History as slots of a ring, one for each token.

    Writing Mamba-2's scan state for every token of a run takes longer than the rest of its scan;
    where it is not rounded nobody needs it. So such tensors are stored for some tokens only: a base
    is a token whose based tensors are in memory, and the live state is the last base and the rows
    behind it.

    Attributes:
        window: most tokens of a run that can be taken back.
        slots: of the ring.
        position: tokens consumed.
        history: slots, oldest first, one per token since the last commit that is still intact;
            the last one is live.
        bases: oldest first; none without logs.
        tree: waits for a node to be selected, or None.
        floor: the position that cannot be gone behind, though its rows are there.
        first: see `Ledger`.
    """

    window: int
    slots: int
    position: int = 0
    history: tuple[int, ...] = (0,)
    bases: tuple[Base, ...] = ()
    tree: Tree | None = None
    floor: int = 0
    first: int = 0

    @staticmethod
    def start(window: int, *, logged: bool = False) -> RingLedger:
        """The ledger before any token, in the first slots."""
        bases = (Base(0, 0),) if logged else ()
        return RingLedger(window, ring_slots(window, logged=logged), bases=bases)

    @property
    def live(self) -> int:
        return self.history[-1]

    @property
    def base(self) -> int:
        return self.bases[-1].slot if self.bases else 0

    @property
    def pending(self) -> range:
        """Neighbouring slots, up to the live one."""
        behind = self.position - self.bases[-1].position if self.bases else 0
        return range(self.history[-1] + 1 - behind, self.history[-1] + 1)

    @property
    def reach(self) -> int:
        kept = min(len(self.history) - 1, self.position - self.floor)
        if self.bases:
            kept = min(kept, self.position - self.bases[0].position)
        return min(self.window, kept)

    @property
    def here(self) -> Slots:
        return Slots((self.live,), (self.base,), self.pending)

    @property
    def used(self) -> Slots:
        return Slots(self.history, [base.slot for base in self.bases], self.history)

    # -- forward ---------------------------------------------------------------------------------

    def run(
        self,
        count: int,
        *,
        parents: tuple[int, ...] | None = None,
        commit: bool = False,
        origin: RingLedger | None = None,
    ) -> RingStep:
        """A run of `count` ≤ window tokens, all of which can be taken back; with `commit` any
        number, of which only the last is kept.

        `origin`: where to go back to if a later run of the same request fails; what it needs is
        left alone.
        """
        start = self if origin is None else origin
        pending = self.position - self.bases[-1].position if self.bases else 0
        # where some of it may have to be taken back, and there are rows, those are applied first
        first = pending > 0 and not commit and (parents is not None or count > 1)
        written = 1 if commit else count
        target = self.next_slots(written)
        bases = [base.slot for base in self.bases] if self.bases else []
        if origin is not None:
            if commit:
                used = {self.live, *self.pending, origin.live, *origin.pending}
                behind = range(origin.live + 1, origin.live + self.slots)
                target = next(i % self.slots for i in behind if i % self.slots not in used)
            others = [*bases, *(base.slot for base in origin.bases)]
            # where there is no room besides, one that the origin can do without
            full = _free(others) >= ring_bases(self.window)
            bases = [*bases, origin.base] if full else others
        base = _free(bases) if bases else 0
        during = start.without(target, written)
        if origin is not None:
            during = during.without_base(base)
        run = RingRun(
            self.live, target, self.base, base, pending, pending - 1 + (0 if first else count),
            count, commit, parents is not None,
        )  # fmt: skip
        if commit:
            return RingStep(run, during, self.anchored(target, self.position + count, base))
        after = during if origin is None else self.without(target, written)
        if first:
            after = after.with_base(base)
        if parents is not None:
            tree = Tree(parents, range(target, target + count))
            return RingStep(run, during, after._replace(tree=tree))
        after = after.advanced(target, count)
        return RingStep(run, during, after if first or not bases else after.with_base(base))

    def next_slots(self, count: int) -> int:
        """The first of `count` ≤ window neighbouring slots to write next, the live one excluded."""
        after = self.history[-1] + 1
        return after if after + count <= self.slots else 0

    def applied(self) -> RingStep:
        """A run of one token that leaves the state where it is, and stores the based tensors of the
        live token; what it keeps of its own token is garbage.
        """
        target, base, rows = self.next_slots(1), _free([b.slot for b in self.bases]), self.pending
        run = RingRun(
            self.live, target, self.base, base, len(rows), len(rows) - 1, 1, True, False
        )  # fmt: skip
        during = self.without(target, 1)
        return RingStep(run, during, during.with_base(base))

    def without(self, start: int, count: int) -> RingLedger:
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

    def without_base(self, slot: int) -> RingLedger:
        """The base there is about to be overwritten: bases from that one back are lost."""
        for index, base in enumerate(self.bases):
            if base.slot == slot:
                return self._replace(bases=self.bases[index + 1 :])
        return self

    def with_base(self, slot: int) -> RingLedger:
        """The based tensors of the live token are in `slot` too.

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

    def advanced(self, start: int, count: int) -> RingLedger:
        """The next `count` tokens are in slots start … start+count-1, already without."""
        history = (*self.history, *range(start, start + count))
        position, bases = self.position + count, self.bases
        # as many again as can be taken back at once, so that tokens can be taken back after others
        while len(bases) > 1 and bases[1].position <= position - 2 * self.window:
            bases = bases[1:]
        return RingLedger(
            self.window, self.slots, position, history, bases, None, self.floor, self.first
        )  # fmt: skip

    # -- back and elsewhere ------------------------------------------------------------------------

    def back(self, count: int) -> RingLedger:
        history = self.history[:-count] if count else self.history
        position = self.position - count
        bases = tuple(base for base in self.bases if base.position <= position)
        return self._replace(position=position, history=history, bases=bases, tree=None)

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """A run reads neighbours: what is kept closes ranks. Parents come before children, so
        path[i] ≥ i and nothing is overwritten unread.
        """
        slots = () if self.tree is None else self.tree.slots
        return [(slots[node], slots[i]) for i, node in enumerate(path) if node != i]

    def chosen(self, path: Sequence[int]) -> RingLedger:
        start = self.tree.slots[0] if self.tree is not None else 0
        return self._replace(tree=None).advanced(start, len(path))

    def with_room(self, count: int) -> RingLedger:
        return self

    def sliding_from(self, first: int) -> RingLedger:
        return self._replace(first=first)

    def elsewhere(self, position: int, pending: int) -> RingLedger:
        count, start = max(1, pending), 0
        used = {self.live, *self.pending}
        while not used.isdisjoint(range(start, start + count)):
            start += 1
        bases = (Base(position - pending, _free([self.base])),) if self.bases else ()
        history = tuple(range(start, start + count))
        return RingLedger(self.window, self.slots, position, history, bases, floor=position)

    def anchored(self, slot: int, position: int, base: int) -> RingLedger:
        """`slot` is live after `position` tokens, `base` has its based tensors where there are
        any, and nothing lies behind it.
        """
        bases = (Base(position, base),) if self.bases else ()
        history = (slot,)
        return RingLedger(self.window, self.slots, position, history, bases, first=self.first)


def _free(used: Iterable[int]) -> int:
    taken, slot = set(used), 0
    while slot in taken:
        slot += 1
    return slot
