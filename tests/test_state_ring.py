"""The ring's ledger against a memory that is really overwritten."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edge.runtime.ring import RingLedger, RingStep, ring_bases, ring_slots


class RingMachine(RuleBasedStateMachine):
    """Slots hold the tokens seen so far, logs one token, bases the tokens seen so far: a rewind
    must find them unchanged. Runs write what `edge.runtime.ort` writes.
    """

    @initialize(window=st.integers(1, 9), logged=st.booleans())
    def start(self, window: int, logged: bool) -> None:
        self.window, self.logged = window, logged
        self.ledger = RingLedger.start(window, logged=logged)
        self.slots: list[tuple[int, ...] | None] = [None] * ring_slots(window, logged=logged)
        self.rows: list[int | None] = [None] * len(self.slots)
        self.bases: list[tuple[int, ...] | None] = [None] * ring_bases(window)
        self.slots[0] = self.bases[0] = ()
        self.tokens: tuple[int, ...] = ()
        self.next_token = 0
        # number of tokens that `State.reach` promises to be rewindable
        self.promised = 0

    def fresh(self) -> int:
        self.next_token += 1
        return self.next_token

    def scanned(self, ledger: RingLedger) -> tuple[int | None, ...] | None:
        """Return the tokens in the scan states: a base's, and those logged since."""
        base = self.bases[ledger.base]
        return None if base is None else (*base, *(self.rows[slot] for slot in ledger.pending))

    def write(self, step: RingStep, seen: list[tuple[int, ...]]) -> None:
        """Write as a run does, depending on what it read: `seen` after each of its tokens."""
        run, before = step.run, self.ledger
        written = 1 if run.commit else run.tokens
        target = range(run.target, run.target + written)
        assert run.source not in target, "the run would overwrite its input"
        assert not set(before.pending) & set(target), "the run would overwrite what it replays"
        assert self.slots[run.source] == self.tokens
        if self.logged:
            assert run.new_base != run.base
            assert self.scanned(before) == self.tokens
            after = run.stored + 1 - run.pending
            self.bases[run.new_base] = seen[after - 1] if after else self.tokens
        kept = seen[-1:] if run.commit else seen
        for slot, history in zip(target, kept, strict=True):
            self.slots[slot] = history
            self.rows[slot] = None if run.commit else history[-1]

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        new = tuple(self.fresh() for _ in range(count))
        step = self.ledger.run(count)
        self.write(step, [self.tokens + new[: i + 1] for i in range(count)])
        self.ledger, self.tokens = step.after, self.tokens + new
        self.promised = min(self.window, self.promised + count)

    @rule(data=st.data(), commit=st.booleans())
    def failed_run(self, data: st.DataObject, commit: bool) -> None:
        count = data.draw(st.integers(1, self.window))
        step = self.ledger.run(count, commit=commit)
        self.write(step, [(-1,)] * count)
        self.ledger = step.during
        self.promised = min(self.promised, self.window - count)

    @rule(data=st.data(), commit=st.booleans(), fails=st.booleans())
    def run_one_by_one(self, data: st.DataObject, commit: bool, fails: bool) -> None:
        """Make one request as runs of one token; until all succeed the state stays where it was."""
        if self.window == 1 and not commit:
            return
        count = data.draw(st.integers(2, 3 * self.window if commit else self.window))
        before, tokens, promised = self.ledger, self.tokens, self.promised
        origin = before
        for _ in range(count):
            new = (self.fresh(),)
            step = self.ledger.run(1, commit=commit, origin=origin)
            self.write(step, [self.tokens + new])
            origin, self.ledger, self.tokens = step.during, step.after, self.tokens + new
        if fails:
            self.ledger, self.tokens = origin, tokens
            self.promised = max(0, min(promised, self.window - count))
        else:
            self.promised = 0 if commit else min(self.window, promised + count)

    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        parents = tuple(data.draw(st.integers(-1, node - 1)) for node in range(count))
        seen: list[tuple[int, ...]] = []
        for parent in parents:
            seen.append((self.tokens if parent < 0 else seen[parent]) + (self.fresh(),))
        step = self.ledger.run(count, parents=parents)
        self.write(step, seen)
        tree = step.after.tree
        assert tree is not None
        path = tree.path(data.draw(st.integers(-1, count - 1)))
        for source, target in step.after.moves(path):
            self.slots[target], self.rows[target] = self.slots[source], self.rows[source]
        self.ledger = step.after.chosen(path)
        self.tokens = seen[path[-1]] if path else self.tokens
        self.promised = min(self.window, min(self.promised, self.window - count) + len(path))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.ledger.reach))
        self.ledger = self.ledger.back(count)
        self.tokens = self.tokens[: len(self.tokens) - count]
        self.promised = max(0, self.promised - count)

    @rule(count=st.integers(1, 20))
    def commit(self, count: int) -> None:
        new = tuple(self.fresh() for _ in range(count))
        step = self.ledger.run(count, commit=True)
        self.write(step, [self.tokens + new[: i + 1] for i in range(count)])
        self.ledger, self.tokens = step.after, self.tokens + new
        self.promised = 0

    @rule()
    def apply(self) -> None:
        """Do as a save does: bring the scan states up to the live token."""
        if self.ledger.pending:
            before, step = self.ledger.reach, self.ledger.applied()
            self.write(step, [(-1,)])
            self.ledger = step.after
            assert self.ledger.reach == before and not self.ledger.pending

    @rule(data=st.data())
    def copy_in(self, data: st.DataObject) -> None:
        """Copy a whole state beside the live one, which stays intact until the copy is complete."""
        pending = data.draw(st.integers(0, self.window)) if self.logged else 0
        tokens = tuple(self.fresh() for _ in range(pending + 2))
        after, used = self.ledger.elsewhere(len(tokens), pending), self.ledger.here
        assert not {*used.kept, *used.rows} & {*after.here.kept, *after.here.rows}
        assert not self.logged or used.based != after.here.based
        self.slots[after.live] = tokens
        self.bases[after.base] = tokens[: len(tokens) - pending]
        for slot, token in zip(after.pending, tokens[len(tokens) - pending :], strict=True):
            self.rows[slot] = token
        self.ledger, self.tokens, self.promised = after, tokens, 0
        assert not after.reach

    @invariant()
    def everything_in_reach_is_intact(self) -> None:
        assert self.ledger.position == len(self.tokens)
        assert self.promised <= self.ledger.reach <= self.window
        for back in range(self.ledger.reach + 1):
            ledger = self.ledger.back(back)
            assert self.slots[ledger.live] == self.tokens[: len(self.tokens) - back]
            if self.logged:
                assert self.scanned(ledger) == self.tokens[: len(self.tokens) - back]


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("window", [1, 2, 8])
def test_single_steps_keep_a_whole_window_in_reach(window: int) -> None:
    ledger = RingLedger.start(window)
    for step in range(5 * window):
        ledger = ledger.run(1).after
        assert ledger.reach == min(window, step + 1)
