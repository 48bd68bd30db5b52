"""Every verb in any order, against an engine that recomputes bit for bit and against torch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from edge.errors import ContextFullError, StateError
from edge.export.network import Network, NetworkState
from edge.runtime.state_memory import Snapshot
from tests.engine_models import (
    INT8,
    KINDS,
    ROUNDED,
    RUN_KINDS,
    SLIDING,
    config_of,
    engine_of,
    network,
)

CAPACITY = 40
WINDOW = 4


@dataclass
class Run:
    """One run still in effect: how to repeat it, and which of its tokens are kept."""

    ids: np.ndarray
    commit: bool
    parents: list[int] | None
    path: list[int]  # kept tokens, as indices into ids
    before: Snapshot
    after: Snapshot
    network_before: NetworkState | None
    network_after: NetworkState | None


class VerbsMachine(RuleBasedStateMachine):
    kind = engine_name = ""

    @property
    def network(self) -> Network | None:
        """Return the network to compare fp32 models with; quantized ones drift away from it."""
        return network(self.kind) if self.kind in KINDS else None

    @property
    def caches(self) -> bool:
        return config_of(self.kind).has_attention

    @initialize(batch=st.sampled_from([1, 1, 2]), window=st.sampled_from([1, WINDOW]))
    def start(self, batch: int, window: int) -> None:
        self.batch, self.window = batch, window
        self.engine = engine_of(self.kind, self.engine_name)
        self.state = self.new_state()
        # the oracle's state is restored before every run, so its past has no influence
        self.oracle = self.new_state()
        self.empty = self.oracle.snapshot()
        self.network_empty = None if self.network is None else self.network.initial_state(batch)
        self.runs: list[Run] = []
        self.saved: list[tuple[Snapshot, list[Run]]] = []
        self.seed = 0

    def new_state(self):  # type: ignore[no-untyped-def]
        capacity = CAPACITY if self.caches else None
        return self.engine.new_state(batch=self.batch, window=self.window, capacity=capacity)

    def ids(self, count: int) -> np.ndarray:
        self.seed += 1
        return np.random.default_rng(self.seed).integers(0, 40, (self.batch, count))

    def expected(self) -> Snapshot:
        return self.runs[-1].after if self.runs else self.empty

    def repeat(self, run: Run) -> np.ndarray:
        """Repeat the run on the oracle, from the state before it; set `after`, return logits."""
        oracle = self.oracle
        oracle.restore(run.before)
        logits = self.engine.run(
            run.ids, oracle, rows="all", parents=run.parents, commit=run.commit
        ).copy()
        if run.parents is not None:
            oracle.select(run.path[-1])
        else:
            oracle.rewind(run.ids.shape[1] - len(run.path))
        run.after = oracle.snapshot()
        if self.network is not None:
            kept = torch.from_numpy(run.ids[:, run.path])
            expected, run.network_after = self.network(kept, run.network_before)
            np.testing.assert_allclose(logits[:, run.path], expected.numpy(), rtol=1e-4, atol=1e-4)
        return logits

    def new_run(
        self,
        ids: np.ndarray,
        path: list[int],
        *,
        commit: bool = False,
        parents: list[int] | None = None,
    ) -> Run:
        network = self.runs[-1].network_after if self.runs else self.network_empty
        return Run(
            ids, commit, parents, path, self.expected(), self.empty, network, self.network_empty
        )

    def same(self, found: np.ndarray, wanted: np.ndarray) -> bool:
        """Compare to the bit. What is rebuilt from logs is summed in a different order, and where
        values are then rounded one may round the other way.
        """
        if not getattr(self.state, "bases", None) or not found.size:
            return np.array_equal(found, wanted)
        rounded = self.kind in ROUNDED or self.kind in INT8
        if found.dtype == np.int8:
            return int(np.abs(found.astype(int) - wanted.astype(int)).max()) <= 1
        bound = (5e-2 if rounded else 1e-4) * max(1e-3, float(np.abs(wanted).max()))
        return float(np.abs(found.astype(np.float64) - wanted).max()) <= bound

    def fits(self, count: int) -> bool:
        return not self.caches or self.state.position + count <= CAPACITY

    def push(self, ids: np.ndarray, *, commit: bool = False) -> None:
        if not self.fits(ids.shape[1]):
            with pytest.raises(ContextFullError):
                self.engine.run(ids, self.state, commit=commit)
            return
        run = self.new_run(ids, list(range(ids.shape[1])), commit=commit)
        logits = self.engine.run(ids, self.state, rows="all", commit=commit)
        assert self.same(logits, self.repeat(run))
        self.runs.append(run)

    # -- ways forward ----------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        self.push(self.ids(1))

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        self.push(self.ids(data.draw(st.integers(1, self.window))))

    @rule(count=st.integers(1, 12))
    def prefill(self, count: int) -> None:
        self.push(self.ids(count), commit=True)

    @precondition(lambda self: self.batch == 1 or not self.caches)
    @rule(data=st.data())
    def tree(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.window))
        if not self.fits(count):
            return
        ids = self.ids(count)
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
        node = data.draw(st.integers(-1, count - 1))
        reach = self.state.reach
        logits = self.engine.run(ids, self.state, rows="all", parents=parents).copy()
        for verb in (self.state.snapshot, lambda: self.state.rewind(1), self.state.fork):
            with pytest.raises(StateError, match="select"):
                verb()
        self.state.select(node)
        if node < 0:
            assert self.state.reach >= min(reach, self.window - count)
            return
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        run = self.new_run(ids, path, parents=parents)
        assert self.same(logits, self.repeat(run))
        self.runs.append(run)

    # -- ways back -------------------------------------------------------------------------------

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.state.reach))
        self.state.rewind(count)
        while count and count >= len(self.runs[-1].path):
            count -= len(self.runs.pop().path)
        if count:
            run = self.runs[-1]
            assert not run.commit, "a committed run was cut"
            run = replace(run, path=run.path[:-count])
            self.repeat(run)
            self.runs[-1] = run

    @rule()
    def rewind_too_far(self) -> None:
        reach = self.state.reach
        with pytest.raises(StateError, match=f"{reach} can be taken back"):
            self.state.rewind(reach + 1)
        assert self.state.reach == reach

    @rule()
    def clear(self) -> None:
        self.state.clear()
        self.runs = []

    @rule()
    def snapshot(self) -> None:
        self.saved.append((self.state.snapshot(), list(self.runs)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        snapshot, runs = data.draw(st.sampled_from(self.saved))
        self.state.restore(snapshot)
        self.runs = list(runs)
        assert self.state.reach == 0

    @rule()
    def fork(self) -> None:
        other = self.state.fork()
        assert other.reach == self.state.reach
        # operations on the one left behind must not show in the other
        if self.fits(1):
            self.engine.run(self.ids(1), self.state)
        self.state.clear()
        self.state = other

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.state.save(Path(folder) / "state", {"turns": [1, "zwei"]})
            self.state = self.new_state()
            assert self.state.load(Path(folder) / "state") == {"turns": [1, "zwei"]}

    # -- invariants --------------------------------------------------------------------------------

    @invariant()
    def same_as_never_otherwise(self) -> None:
        expected, arrays = self.expected(), self.state.arrays()
        assert self.state.position == expected.position
        self.oracle.restore(expected)
        for name, array in self.oracle.arrays().items():
            assert self.same(arrays[name], array), name
        final = self.runs[-1].network_after if self.runs else self.network_empty
        for index, layer in enumerate(final.layers if final is not None else ()):
            for key, tensor in layer.items():
                name = f"layers.{index}.{key}"
                have, wanted = arrays[name][..., : tensor.shape[-1]], tensor.numpy()
                if self.state.layout.slides(name):
                    wanted = wanted[:, :, max(0, wanted.shape[2] - SLIDING + 1) :]
                np.testing.assert_allclose(have, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "engine"), RUN_KINDS)
def test_verbs_in_any_order(kind: str, engine: str) -> None:
    class Machine(VerbsMachine):
        pass

    Machine.kind, Machine.engine_name = kind, engine
    from hypothesis.stateful import run_state_machine_as_test

    # each kind of model has a machine, and the ledgers alone have tests of their own
    examples = 12 if engine == "ort" else 6
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples, stateful_step_count=30)
    )
