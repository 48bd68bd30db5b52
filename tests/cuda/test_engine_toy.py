"""The engine with a model computed by hand: every verb in any order, for several sequences."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edge.errors import ContextFullError, EngineError, StateError
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.state import DeviceState
from edge.runtime.state_memory import Snapshot
from tests.cuda import toy

pytestmark = pytest.mark.without_gpu

CAPACITY = 40


def ids(count: int, batch: int = 1, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, toy.V, (batch, count))


def poison(engine: CudaEngine, state: DeviceState) -> None:
    """Write NaN to everything that a run must not rely on."""
    with engine.exclusive as device:
        for memory in (state.workspace.arena, state.workspace.memory):
            device.fill(memory, 0, memory.nbytes, 0xFF)
        place = state.where["layers.0.ssm_state"]
        for free in set(range(state.ledger.slots)) - set(state.ledger.used.kept):
            device.fill(state.recurrent, place.offset + free * place.slot, place.slot, 0xFF)


class VerbsMachine(RuleBasedStateMachine):
    """The rules of `tests/test_state_verbs.py`, exactly, and for any batch."""

    @initialize(batch=st.sampled_from([1, 2, 3]), window=st.sampled_from([1, 2, 5]))
    def start(self, batch: int, window: int) -> None:
        self.engine = toy.engine()
        self.batch, self.window = batch, window
        self.state = self.engine.new_state(batch=batch, window=window, capacity=CAPACITY)
        self.tokens = np.zeros((batch, 0), np.int64)
        self.saved: list[tuple[Snapshot, np.ndarray]] = []
        self.seed, self.promised = 0, 0

    def fresh(self, count: int) -> np.ndarray:
        self.seed += 1
        return ids(count, self.batch, self.seed)

    def fits(self, count: int) -> bool:
        return self.tokens.shape[1] + count <= CAPACITY

    def push(self, new: np.ndarray, *, commit: bool = False, rows: object = "all") -> None:
        if not self.fits(new.shape[1]):
            with pytest.raises(ContextFullError):
                self.engine.run(new, self.state, commit=commit)
            return
        poison(self.engine, self.state)
        before = self.tokens.shape[1]
        found = self.engine.run(new, self.state, commit=commit, rows=rows)  # type: ignore[arg-type]
        self.tokens = np.concatenate([self.tokens, new], 1)
        wanted = {"all": slice(None), "last": slice(-1, None)}.get(str(rows), rows)
        for row, sequence in zip(found, self.tokens, strict=True):
            assert np.array_equal(row, toy.expected(sequence)[0][before:][wanted])
        count = new.shape[1]
        self.promised = 0 if commit else min(self.window, self.promised + count)

    @rule()
    def step(self) -> None:
        self.push(self.fresh(1), rows="last")

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        self.push(self.fresh(data.draw(st.integers(1, self.window))))

    @rule(count=st.integers(1, 20), rows=st.sampled_from(["last", "all", [0], [0, 0]]))
    def prefill(self, count: int, rows: object) -> None:
        wanted = rows[:count] if isinstance(rows, list) else rows
        self.push(self.fresh(count), commit=True, rows=wanted)

    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        # the plan's tree programs hold no more rows
        count = data.draw(st.integers(1, min(self.window, 16 // self.batch)))
        if not self.fits(count):
            return
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
        new = self.fresh(count)
        poison(self.engine, self.state)
        found = self.engine.run(new, self.state, parents=parents, rows="all").copy()
        paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), node])
            for b in range(self.batch):
                alone = [*self.tokens[b], *new[b, paths[node]]]
                assert np.array_equal(found[b, node], toy.expected(alone)[0][-1])
        for verb in (self.state.snapshot, lambda: self.state.rewind(1), self.state.fork):
            with pytest.raises(StateError, match="select"):
                verb()
        with pytest.raises(StateError, match="select"):
            self.engine.run(new, self.state)
        node = data.draw(st.integers(-1, count - 1))
        self.state.select(node)
        path = paths[node] if node >= 0 else []
        self.tokens = np.concatenate([self.tokens, new[:, path]], 1)
        kept = min(self.promised, self.window - count)
        self.promised = min(self.window, kept + len(path))

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.state.reach))
        self.state.rewind(count)
        self.tokens = self.tokens[:, : self.tokens.shape[1] - count]
        self.promised = max(0, self.promised - count)

    @rule()
    def rewind_too_far(self) -> None:
        reach = self.state.reach
        with pytest.raises(StateError, match=f"{reach} can be taken back"):
            self.state.rewind(reach + 1)

    @rule()
    def clear(self) -> None:
        self.state.clear()
        self.tokens, self.promised = self.tokens[:, :0], 0

    @rule()
    def snapshot(self) -> None:
        self.saved.append((self.state.snapshot(), self.tokens))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, self.tokens = data.draw(st.sampled_from(self.saved))
        self.state.restore(snapshot)
        self.promised = 0

    @rule()
    def fork(self) -> None:
        other = self.state.fork()
        assert other.reach == self.state.reach
        if self.fits(1):
            self.engine.run(self.fresh(1), self.state)
        self.state.clear()
        assert isinstance(other, DeviceState)
        self.state = other

    @precondition(lambda self: self.batch == 1)
    @rule()
    def fork_to_three(self) -> None:
        other = self.state.fork(3)
        assert (other.reach, other.batch) == (self.state.reach, 3)
        assert isinstance(other, DeviceState)
        self.state, self.batch, self.saved = other, 3, []
        self.tokens = np.repeat(self.tokens, 3, 0)

    @precondition(lambda self: self.batch <= 3)
    @rule(count=st.sampled_from([1, 2, 3]))
    def spread(self, count: int) -> None:
        other = self.engine.new_state(
            batch=self.batch * count, window=self.window, capacity=CAPACITY + 3
        )
        self.engine.run(ids(1, other.batch, 7), other)
        reach = self.state.reach
        self.state.spread(other)
        assert (other.reach, self.state.reach) == (0, reach)
        if count == 1:  # a spread state continues as if nothing had happened
            return
        for name, array in self.state.arrays().items():
            assert np.array_equal(other.arrays()[name], np.repeat(array, count, 0))
        other = self.engine.new_state(batch=other.batch, window=self.window, capacity=CAPACITY)
        self.state.spread(other)
        self.state, self.batch, self.saved = other, other.batch, []
        self.tokens, self.promised = np.repeat(self.tokens, count, 0), 0

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.state.save(Path(folder) / "state", {"turns": 3})
            self.state = self.engine.new_state(
                batch=self.batch, window=self.window, capacity=CAPACITY
            )
            assert self.state.load(Path(folder) / "state") == {"turns": 3}
        self.promised = 0

    @rule()
    def run_that_fails(self) -> None:
        """The failed run's writes are invisible."""
        count = min(self.window, CAPACITY - self.tokens.shape[1])
        if count < 1:
            return
        out, state = self.state.workspace.out, self.state
        device = self.engine.exclusive.device
        wait = device.wait

        def spoiled() -> None:
            wait()
            out[:] = 0xFF

        device.wait = spoiled  # type: ignore[method-assign]
        try:
            with pytest.raises(EngineError, match="not finite"):
                self.engine.run(self.fresh(count), state)
        finally:
            device.wait = wait  # type: ignore[method-assign]
        self.promised = min(self.promised, self.window - count)  # room was made for it

    @invariant()
    def as_if_never_otherwise(self) -> None:
        assert self.state.position == self.tokens.shape[1]
        assert self.promised <= self.state.reach <= self.window
        arrays = self.state.arrays()
        for b, sequence in enumerate(self.tokens):
            for name, value in toy.expected(sequence)[1].items():
                assert np.array_equal(arrays[name][b], value), name


def test_verbs_in_any_order() -> None:
    run_state_machine_as_test(
        VerbsMachine, settings=settings(max_examples=12, stateful_step_count=12)
    )
