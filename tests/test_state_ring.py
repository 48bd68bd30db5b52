"""The ring's bookkeeping against a memory that is really overwritten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge.runtime.ring import Place, Tree, bases_for, slots_for


class RingMachine(RuleBasedStateMachine):
    """Slots hold the tokens seen so far, logs one token, bases the tokens seen so far: going back
    must find them as they were. Runs write what `edge.runtime.ort` writes.
    """

    @initialize(window=st.integers(1, 9), logged=st.booleans())
    def start(self, window: int, logged: bool) -> None:
        self.window, self.logged = window, logged
        self.place = Place.start(window, logged=logged)
        self.slots: list[tuple[int, ...] | None] = [None] * slots_for(window, logged=logged)
        self.rows: list[int | None] = [None] * len(self.slots)
        self.bases: list[tuple[int, ...] | None] = [None] * bases_for(window)
        self.slots[0] = self.bases[0] = ()
        self.tokens: tuple[int, ...] = ()
        self.next_token = 0
        # tokens that must be within reach, by the promise of `State.reach`
        self.promised = 0

    def write(self, count: int) -> tuple[int, int]:
        """A run's slots and base, filled with garbage as a run that may still fail would."""
        target, base = self.place.next_slots(count), self.place.next_base()
        self.place = self.place.without(target, count)
        pending = self.place.live - self.place.pending
        for read in (self.place.live, *range(pending + 1, self.place.live + 1)):
            assert not target <= read < target + count, "the run would overwrite its input"
        self.slots[target : target + count] = self.rows[target : target + count] = [None] * count
        if self.logged:
            assert base != self.place.base
            self.bases[base] = None
        return target, base

    def fresh(self) -> int:
        self.next_token += 1
        return self.next_token

    def scanned(self, place: Place) -> tuple[int | None, ...] | None:
        """Tokens in the scan states: a base's, and those logged since."""
        base = self.bases[place.base]
        first = place.live - place.pending + 1
        return None if base is None else (*base, *self.rows[first : place.live + 1])

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        first = self.place.applies_first(count, commit=False, tree=False)
        target, base = self.write(count)
        if first:
            self.bases[base] = self.tokens
            self.place = self.place.with_base(base)
        for index in range(count):
            self.tokens += (self.fresh(),)
            self.slots[target + index], self.rows[target + index] = self.tokens, self.next_token
        self.place = self.place.advanced(target, count)
        if self.logged and not first:
            self.bases[base] = self.tokens
            self.place = self.place.with_base(base)
        self.promised = min(self.window, self.promised + count)

    @rule(data=st.data())
    def failed_run(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        self.write(count)
        self.promised = min(self.promised, self.window - count)

    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(count))
        first = self.place.applies_first(count, commit=False, tree=True)
        target, base = self.write(count)
        if first:
            self.bases[base] = self.tokens
            self.place = self.place.with_base(base)
        seen: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            seen.append((self.tokens if parent < 0 else seen[parent]) + (self.fresh(),))
            self.slots[target + node], self.rows[target + node] = seen[node], self.next_token
        self.place = self.place.branched(Tree(target, parents)).pruned()
        node = data.draw(st.integers(-1, count - 1))
        path = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        for index, source in enumerate(path):
            self.slots[target + index] = self.slots[target + source]
            self.rows[target + index] = self.rows[target + source]
        self.place = self.place.advanced(target, len(path))
        self.tokens = seen[path[-1]] if path else self.tokens
        self.promised = min(self.window, min(self.promised, self.window - count) + len(path))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.place.reach))
        self.place = self.place.back(count)
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.promised = max(0, self.promised - count)

    @rule()
    def commit(self) -> None:
        target, base = self.write(1)
        self.tokens += (self.fresh(),)
        self.slots[target] = self.bases[base] = self.tokens
        self.place = self.place.settled(target, len(self.tokens), base)
        self.promised = 0

    @rule()
    def settle(self) -> None:
        """As a snapshot makes it be: the scan states are brought up to the live token."""
        if self.place.pending:
            slot, base = self.place.next_slots(1), self.place.next_base()
            before = self.place.reach
            self.place = self.place.without(slot, 1)
            self.slots[slot] = self.rows[slot] = None
            self.bases[base] = self.tokens
            self.place = self.place.with_base(base)
            assert self.place.reach == before and not self.place.pending

    @invariant()
    def everything_in_reach_is_intact(self) -> None:
        assert self.place.position == len(self.tokens)
        assert self.promised <= self.place.reach <= self.window
        for back in range(self.place.reach + 1):
            place = self.place.back(back)
            assert self.slots[place.live] == self.tokens[: len(self.tokens) - back]
            if self.logged:
                assert self.scanned(place) == self.tokens[: len(self.tokens) - back]

    @invariant()
    def spare_slots_are_spare(self) -> None:
        assert len({*self.place.spare_slots(), self.place.live}) == 3
        assert max(self.place.spare_slots()) < len(self.slots)
        assert not self.logged or len({*self.place.spare_bases(), self.place.base}) == 3
        assert max(*self.place.spare_bases(), self.place.next_base()) < len(self.bases)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_single_steps_keep_a_whole_window_in_reach(window: int) -> None:
    place = Place.start(window)
    for step in range(5 * window):
        target = place.next_slots(1)
        place = place.without(target, 1).advanced(target, 1)
        assert place.reach == min(window, step + 1)
