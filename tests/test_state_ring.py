"""The ring's bookkeeping against a memory that is really overwritten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge.runtime.ring import Place, Tree, slots_for


class RingMachine(RuleBasedStateMachine):
    """Slots hold the tokens seen so far; going back must find them as they were."""

    @initialize(window=st.integers(1, 9))
    def start(self, window: int) -> None:
        self.window = window
        self.place = Place(window)
        self.slots: list[tuple[int, ...] | None] = [None] * slots_for(window)
        self.slots[0] = ()
        self.tokens: tuple[int, ...] = ()
        self.next_token = 0
        # tokens that must be within reach, by the promise of `State.reach`
        self.promised = 0

    def write(self, count: int) -> int:
        """A run's slots, filled with garbage as a run that may still fail would."""
        target = self.place.next_slots(count)
        self.place = self.place.without(target, count)
        assert not target <= self.place.live < target + count, "the run would overwrite its input"
        self.slots[target : target + count] = [None] * count
        return target

    def fresh(self) -> int:
        self.next_token += 1
        return self.next_token

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        target = self.write(count)
        for index in range(count):
            self.tokens += (self.fresh(),)
            self.slots[target + index] = self.tokens
        self.place = self.place.advanced(target, count)
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
        target = self.write(count)
        seen: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            seen.append((self.tokens if parent < 0 else seen[parent]) + (self.fresh(),))
            self.slots[target + node] = seen[node]
        self.place = self.place.branched(Tree(target, parents)).pruned()
        node = data.draw(st.integers(-1, count - 1))
        path = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        for index, source in enumerate(path):
            self.slots[target + index] = self.slots[target + source]
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
        target = self.write(1)
        self.tokens += (self.fresh(),)
        self.slots[target] = self.tokens
        self.place = self.place.settled(target, len(self.tokens))
        self.promised = 0

    @invariant()
    def everything_in_reach_is_intact(self) -> None:
        assert self.place.position == len(self.tokens)
        assert self.promised <= self.place.reach <= self.window
        for back in range(self.place.reach + 1):
            place = self.place.back(back)
            assert self.slots[place.live] == self.tokens[: len(self.tokens) - back]

    @invariant()
    def spare_slots_are_spare(self) -> None:
        assert len({*self.place.spare_slots(), self.place.live}) == 3
        assert max(self.place.spare_slots()) < slots_for(self.window)


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_single_steps_keep_a_whole_window_in_reach(window: int) -> None:
    place = Place(window)
    for step in range(5 * window):
        target = place.next_slots(1)
        place = place.without(target, 1).advanced(target, 1)
        assert place.reach == min(window, step + 1)
