"""Ring history: one slot per token, so that a rewind only chooses a slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge.runtime.ledger import Slots, Tree


def ring_slots(window: int, *, logged: bool = False) -> int:
    """Return the number of ring slots for runs of at most `window` tokens.

    It is 2·window + 1, or 4·window + 1 with logs.

    Why this suffices: A run of T ≤ W tokens reads the live slot and writes T adjacent slots,
    because one output of the graph is one block of memory. They follow the live slot or, if they do
    not fit there, start at slot 0. So the history lies in at most two stretches: an older one that
    ends at some slot e, and one that grows from slot 0. The second begins when T₁ tokens do not fit
    after e, so e ≥ slots - T₁. After c tokens have been written from slot 0, rewinding R tokens
    still needs the newest R + 1 - c states of the older stretch, whose lowest slot is e - R + c ≥
    slots - T₁ - R + c. The c tokens end at slot c - 1. The stretches do not meet while slots >
    R + T₁ - 1, and T₁ ≤ W, so R + W slots suffice. (When the growing stretch reaches the end, it is
    longer than R slots, and the older one is no longer needed.) Without logs R is W, and usually
    more is intact. With logs, bases go back 2·W tokens, and a token there may need the W rows
    before it, so R is 3·W.

    The extra slot serves W = 1: a committing run that is split into single tokens alternates
    between two slots and must preserve the state it started from until it has succeeded, which
    takes three. It also suffices for copying in a state beside the live one: of the 3·W slots that
    the live state and its rows leave free, W are adjacent.
    """
    return (4 if logged else 2) * window + 1


def ring_bases(window: int) -> int:
    """Return the number of bases to allocate: at most 8, however long the window.

    Any W tokens keep two bases (`RingLedger.with_base` drops the middle one of three that close,
    unless the ring wraps to slot 0 between them, with two on either side). So there are six within
    the last 2·W tokens, the newest one before those, and the one that a run writes. Steps alternate
    between two of them, which stay in the CPU cache.
    """
    return min(2 * window, 6) + 2


class Base(NamedTuple):
    """A token at which based tensors are stored: its position, and their slot."""

    position: int
    slot: int


class RingRun(NamedTuple):
    """What a run reads and writes. Runs that are equal here use the same buffers.

    Attributes:
        source, target: slots of the state read and of the first token written.
        base, new_base: slots of based tensors that are read and written.
        pending: number of log rows to replay, up to the source's.
        stored: index of the token after which based tensors are written, counting pending ones
            first.
        tokens: number of tokens in the run.
        commit: whether only the last token is kept.
        tree: whether the run is a tree.
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
    """One run and its ledgers.

    Attributes:
        run: what it reads and writes.
        during: ledger from the start of the run on, and after a failure; without the history that
            the run overwrites.
        after: ledger once the run has succeeded.
    """

    run: RingRun
    during: RingLedger
    after: RingLedger


class RingLedger(NamedTuple):
    """History as slots of a ring, one for each token.

    Writing Mamba-2's scan state for every token of a run takes longer than the rest of its scan,
    and is not needed unless the state is rounded after each token. So such tensors are stored only
    at some tokens, the bases. The live state is the last base and the log rows after it.

    Attributes:
        window: maximum number of tokens that can be rewound.
        slots: number of slots in the ring.
        position: number of tokens consumed.
        history: slots of the tokens since the last commit that are still intact, oldest first; the
            last one is live.
        bases: the bases, oldest first; none without logs.
        tree: the tree that waits for a node to be selected, or None.
        floor: position that a rewind cannot cross, even if its rows are there.
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
        """Return the ledger before any token, in the first slots."""
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
        """Adjacent slots up to the live one."""
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

    def run(
        self,
        count: int,
        *,
        parents: tuple[int, ...] | None = None,
        commit: bool = False,
        origin: RingLedger | None = None,
    ) -> RingStep:
        """Plan a run of `count` ≤ window tokens that can all be rewound.

        With `commit`, the run may have any length and keeps only the last state. `origin`: ledger
        to return to if a later run of the same request fails; its slots are preserved.
        """
        start = self if origin is None else origin
        pending = self.position - self.bases[-1].position if self.bases else 0
        # if part of the run may be rewound, store a base before its first token
        store_first = pending > 0 and not commit and (parents is not None or count > 1)
        written = 1 if commit else count
        target = self.next_slots(written)
        bases = [base.slot for base in self.bases] if self.bases else []
        if origin is not None:
            if commit:
                used = {self.live, *self.pending, origin.live, *origin.pending}
                following = range(origin.live + 1, origin.live + self.slots)
                target = next(i % self.slots for i in following if i % self.slots not in used)
            others = [*bases, *(base.slot for base in origin.bases)]
            # without a free slot, overwrite a base other than the origin's last
            bases_full = _first_free(others) >= ring_bases(self.window)
            bases = [*bases, origin.base] if bases_full else others
        base = _first_free(bases) if bases else 0
        during = start.without(target, written)
        if origin is not None:
            during = during.without_base(base)
        run = RingRun(
            self.live, target, self.base, base, pending,
            pending - 1 + (0 if store_first else count), count, commit, parents is not None,
        )  # fmt: skip
        if commit:
            return RingStep(run, during, self.anchored(target, self.position + count, base))
        after = during if origin is None else self.without(target, written)
        if store_first:
            after = after.with_base(base)
        if parents is not None:
            tree = Tree(parents, range(target, target + count))
            return RingStep(run, during, after._replace(tree=tree))
        after = after.advanced(target, count)
        return RingStep(run, during, after if store_first or not bases else after.with_base(base))

    def next_slots(self, count: int) -> int:
        """Return the first of `count` ≤ window adjacent slots to write next, not the live one."""
        after = self.history[-1] + 1
        return after if after + count <= self.slots else 0

    def applied(self) -> RingStep:
        """Plan a run of one token that stores the based tensors of the live token.

        The state stays where it is; what the run writes for its own token is garbage.
        """
        target, base, rows = (
            self.next_slots(1),
            _first_free([b.slot for b in self.bases]),
            self.pending,
        )
        run = RingRun(
            self.live, target, self.base, base, len(rows), len(rows) - 1, 1, True, False
        )  # fmt: skip
        during = self.without(target, 1)
        return RingStep(run, during, during.with_base(base))

    def without(self, start: int, count: int) -> RingLedger:
        """Return the ledger without the tokens at or before slots start … start+count-1.

        Those slots are about to be overwritten.
        """
        history = self.history
        lost = -1
        for slot in range(start, start + count):
            if slot in history:
                lost = max(lost, history.index(slot))
        if lost < 0:
            return self
        history = history[lost + 1 :]
        # a base is usable only while the rows after it are there
        oldest = self.position - len(history)
        bases = tuple(base for base in self.bases if base.position >= oldest)
        return self._replace(history=history, bases=bases)

    def without_base(self, slot: int) -> RingLedger:
        """Return the ledger without the base in `slot`, about to be overwritten, and older ones."""
        for index, base in enumerate(self.bases):
            if base.slot == slot:
                return self._replace(bases=self.bases[index + 1 :])
        return self

    def with_base(self, slot: int) -> RingLedger:
        """Return the ledger with a base at the live token, stored in `slot`.

        The previous base is dropped if the one before it serves as well: it is at most a window
        old, and the rows since then are adjacent.
        """
        bases, position = self.bases, self.position
        if not bases or position <= bases[-1].position:
            return self
        if len(bases) > 1:
            distance = position - bases[-2].position
            reachable = distance <= self.window and distance < len(self.history)
            if reachable and self.history[-1] - self.history[-1 - distance] == distance:
                bases = bases[:-1]
        return self._replace(bases=(*bases, Base(position, slot)))

    def advanced(self, start: int, count: int) -> RingLedger:
        """Return the ledger with `count` more tokens in slots start … start+count-1.

        `without` must have removed those slots.
        """
        history = (*self.history, *range(start, start + count))
        position, bases = self.position + count, self.bases
        # keep bases for two windows, so that a rewind can follow a rewind
        while len(bases) > 1 and bases[1].position <= position - 2 * self.window:
            bases = bases[1:]
        return RingLedger(
            self.window, self.slots, position, history, bases, None, self.floor, self.first
        )  # fmt: skip

    def back(self, count: int) -> RingLedger:
        history = self.history[:-count] if count else self.history
        position = self.position - count
        bases = tuple(base for base in self.bases if base.position <= position)
        return self._replace(position=position, history=history, bases=bases, tree=None)

    def moves(self, path: Sequence[int]) -> list[tuple[int, int]]:
        """Move the nodes on the path together, because a run reads adjacent slots.

        Parents come before children, so path[i] ≥ i and nothing is overwritten unread.
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
        bases = (Base(position - pending, _first_free([self.base])),) if self.bases else ()
        history = tuple(range(start, start + count))
        return RingLedger(self.window, self.slots, position, history, bases, floor=position)

    def anchored(self, slot: int, position: int, base: int) -> RingLedger:
        """Return a ledger without history, with `slot` live after `position` tokens.

        `base` is the slot of its based tensors, if there are any.
        """
        bases = (Base(position, base),) if self.bases else ()
        history = (slot,)
        return RingLedger(self.window, self.slots, position, history, bases, first=self.first)


def _first_free(used: Iterable[int]) -> int:
    taken, slot = set(used), 0
    while slot in taken:
        slot += 1
    return slot
