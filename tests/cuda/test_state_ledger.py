"""The ledger of a device state against memory that is really overwritten and a list of tokens."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge.runtime.cuda.inputs import fill_taps
from edge.runtime.ledger import ADVANCED, LAST, ReplayLedger, ReplayStep, log_slots, state_slots

pytestmark = pytest.mark.without_gpu

GARBAGE = -7
WIDTH = 4  # width of the convolution


class Memory:
    """The memory that kernels keep, for a model whose state is the list of its tokens."""

    def __init__(self, window: int, slots: int) -> None:
        self.states: list[tuple[int, ...]] = [(), *[(GARBAGE,)] * (slots - 1)]
        self.conv = [[0] * (WIDTH - 1), *([GARBAGE] * (WIDTH - 1) for _ in range(slots - 1))]
        self.log = [GARBAGE] * log_slots(window)

    def run(self, step: ReplayStep, tokens: list[int]) -> list[tuple[tuple[int, ...], list[int]]]:
        """Return each token's history and convolution window, by the rules that kernels follow."""
        index = np.full((len(tokens), WIDTH), -1, np.int32)
        state_index = np.full(WIDTH - 1, -1, np.int32)
        fill_taps(step, WIDTH, index, state_index)
        rows = [*self.conv[step.source], *self.log, *tokens]
        history, target = self.states[step.source], step.target
        assert target != step.source
        for j, slot in enumerate(step.pending):
            history += (self.log[slot],)
            if step.store == ADVANCED and j + 1 == step.advance:
                self.states[target] = history
        seen: list[tuple[int, ...]] = []
        for t, token in enumerate(tokens):
            parent = t - 1 if step.parents is None else step.parents[t]
            seen.append((seen[parent] if parent >= 0 else history) + (token,))
        if step.store == LAST:
            self.states[target] = seen[-1] if seen else history
        if step.store:
            self.conv[target] = [rows[i] for i in state_index]
        for slot, token in zip(step.slots, tokens, strict=True):
            if slot >= 0:
                assert slot not in step.pending, "the run would overwrite what it replays"
                self.log[slot] = token
        return [(h, [rows[i] for i in row]) for h, row in zip(seen, index, strict=True)]


def window_of(history: tuple[int, ...]) -> list[int]:
    return [0] * (WIDTH - len(history)) + list(history[-WIDTH:])


class LedgerMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 6), two=st.booleans())
    def start(self, window: int, two: bool) -> None:
        slots = 2 if two else state_slots(window)
        self.window, self.ledger = window, ReplayLedger(window, slots)
        self.memory = Memory(window, slots)
        self.tokens: tuple[int, ...] = ()
        self.last, self.promised = 0, 0

    def fresh(self, count: int) -> list[int]:
        self.last += count
        return list(range(self.last - count + 1, self.last + 1))

    def run(self, step: ReplayStep, tokens: list[int], paths: list[tuple[int, ...]]) -> None:
        assert (step.source, step.past) == (self.ledger.source, len(self.tokens))
        for (history, window), path in zip(self.memory.run(step, tokens), paths, strict=True):
            assert history == self.tokens + path
            assert window == window_of(history)

    @rule(data=st.data())
    def chain(self, data: st.DataObject) -> None:
        new = self.fresh(data.draw(st.integers(1, self.window)))
        step = self.ledger.with_room(len(new)).run(len(new))
        self.run(step, new, [tuple(new[: i + 1]) for i in range(len(new))])
        self.tokens += tuple(new)
        self.ledger = step.after
        self.promised = min(self.window, self.promised + len(new))

    @rule(data=st.data(), committing=st.booleans())
    def run_that_fails(self, data: st.DataObject, committing: bool) -> None:
        new = self.fresh(data.draw(st.integers(1, self.window)))
        self.ledger = self.ledger.with_room(0 if committing else len(new))
        if not committing:
            self.promised = min(self.promised, self.window - len(new))
        self.memory.run(
            self.ledger.commit(len(new)) if committing else self.ledger.run(len(new)), new
        )

    @rule(count=st.integers(1, 9))
    def commit(self, count: int) -> None:
        new = self.fresh(count)
        self.ledger = self.ledger.with_room(0)
        step = self.ledger.commit(count)
        self.run(step, new, [tuple(new[: i + 1]) for i in range(count)])
        assert set(step.slots) == {-1}
        self.tokens += tuple(new)
        self.ledger = step.after
        self.promised = 0

    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(count))
        new = self.fresh(count)
        step = self.ledger.with_room(count).run(count, parents=parents)
        assert step.after.tree is not None
        paths = [step.after.tree.path(node) for node in range(count)]
        assert all(path[-1] == node for node, path in enumerate(paths))
        self.run(step, new, [tuple(new[i] for i in path) for path in paths])
        node = data.draw(st.integers(-1, count - 1))
        path = step.after.tree.path(node)
        self.ledger = step.after.chosen(path)
        self.tokens += tuple(new[i] for i in path)
        self.promised = min(self.window, min(self.promised, self.window - count) + len(path))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.ledger.reach))
        self.ledger = self.ledger.back(count)
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.promised = max(0, self.promised - count)

    @invariant()
    def the_ledger_is_in_order(self) -> None:
        ledger = self.ledger
        assert ledger.position == len(self.tokens)
        assert self.promised <= ledger.reach <= self.window
        assert len(set(ledger.pending)) == len(ledger.pending)
        room = ledger.with_room(0)
        assert room.spare not in room.used.kept and room.reach == ledger.reach
        assert len(ledger.pending) <= self.window
        assert [a.position for a in ledger.anchors] == sorted({a.position for a in ledger.anchors})

    @invariant()
    def everything_in_reach_is_intact(self) -> None:
        for back in range(self.ledger.reach + 1):
            ledger = self.ledger.back(back)
            tokens = self.tokens[: len(self.tokens) - back]
            if not ledger.pending:
                assert self.memory.states[ledger.source] == tokens
                assert self.memory.conv[ledger.source] == window_of(tokens)[1:]
                continue
            step = ledger.applied()
            assert step.after == ledger, "a copy must not cost what can be taken back"
            # after a rewind, memory beyond it may be overwritten
            memory = copy.deepcopy(self.memory) if back else self.memory
            memory.run(step, [])
            assert memory.states[ledger.spare] == tokens
            assert memory.conv[ledger.spare] == window_of(tokens)[1:]


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=30)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_single_steps_keep_a_whole_window_in_reach(window: int) -> None:
    """And replay nothing, while there are enough slots."""
    for slots in (2, state_slots(window)):
        ledger = ReplayLedger(window, slots)
        for count in range(5 * window):
            step = ledger.with_room(1).run(1)
            if slots == 2:
                assert step.store == (ADVANCED if count >= window else 0)
            else:
                assert step.store == LAST and not step.pending
            ledger = step.after
            assert ledger.reach == min(window, count + 1)


def test_a_wide_tree_costs_no_more_reach_than_its_longest_path() -> None:
    ledger = ReplayLedger(4).run(4).after
    step = ledger.run(4, parents=(-1, -1, 0, 0))
    assert (step.advance, step.store) == (2, ADVANCED)
    assert step.after.chosen((1,)).reach == 3
    assert step.after.chosen(()).reach == 2


def test_a_run_kept_whole_leaves_nothing_to_replay() -> None:
    """If tokens of the run were rewound, the next run stores the state before it."""
    ledger = ReplayLedger(8, state_slots(8))
    pending: list[int] = []
    stored: list[int] = []
    for kept in (4, 4, 2, 4, 4, 4, 1, 4, 4, 4):
        step = ledger.with_room(4).run(4)
        pending.append(len(step.pending))
        stored.append(step.store)
        ledger = step.after.back(4 - kept)
    assert pending == [0, 0, 0, 2, 4, 0, 0, 1, 4, 0]
    assert stored == [LAST, LAST, LAST, ADVANCED, LAST, LAST, LAST, ADVANCED, LAST, LAST]
