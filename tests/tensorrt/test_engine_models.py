"""The tensorrt engine without TensorRT itself, against `ort` and `cuda`: every kind of run.

ONNX Runtime runs the device graph in TensorRT's place (`ort_tensorrt`): with separate outputs, as
TensorRT for RTX does, or in place, as with plugins. This shows the graph, its bindings, the ledger
and the copies back, but nothing about plugins, trees or a GPU.
"""

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

from edge.errors import EngineError, InputError, StateError
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.state import DeviceState
from edge.runtime.state_memory import Snapshot
from edge.runtime.tensorrt.bindings import Kind
from tests.cuda.models import CHUNK, poison, tokens
from tests.cuda.test_engine_models import close, same_arrays
from tests.tensorrt import ort_tensorrt
from tests.tensorrt.engines import CAPACITY, Trio, native, tensorrt_engine, trio

# (model of tests/test_graph_models.py, recipe, type of the scans' states)
CASES: dict[str, tuple[str, str, str | None]] = {
    "mamba1": ("mamba1", "fp32", None),
    "mamba1-w8a8": ("mamba1", "w8a8", "int8"),
    "mamba2-fp16": ("mamba2 groups", "fp16", None),
    "hybrid-w8a8": ("all", "w8a8", None),
}


class Pair:
    """One state on `tensorrt` and one on `ort`; every operation is done on both."""

    def __init__(
        self, made: Trio, *, window: int = 3, batch: int = 1, in_place: bool = False
    ) -> None:
        self.made = made
        self.engine = made.plugins if in_place else made.tensorrt
        sizes = {"window": window, "batch": batch, "capacity": CAPACITY}
        self.ours: DeviceState = self.engine.new_state(**sizes)
        self.theirs = made.ort.new_state(**sizes)

    def run(self, ids: np.ndarray, **how: object) -> np.ndarray:
        poison(self.engine, self.ours)
        found = self.engine.run(ids, self.ours, **how)
        expected = self.made.ort.run(ids, self.theirs, **how)
        close(found, expected, rounded=self.made.rounded)
        return found.copy()

    def each(self, verb: str, *arguments: object) -> None:
        for state in (self.ours, self.theirs):
            getattr(state, verb)(*arguments)

    def same(self) -> None:
        assert self.ours.position == self.theirs.position
        same_arrays(self.ours.arrays(), self.theirs.arrays(), self.made.rounded)


@pytest.mark.parametrize(
    ("case", "in_place"),
    [("mamba1", False), ("mamba1-w8a8", True), ("mamba2-fp16", True), ("hybrid-w8a8", False)],
)
def test_chunks_steps_and_going_back(case: str, in_place: bool) -> None:
    pair = Pair(trio(*CASES[case]), in_place=in_place)
    pair.run(tokens(30 if pair.ours.caches else CHUNK, seed=1), commit=True)
    for step in range(5):  # from the fourth on the oldest is applied for good
        pair.run(tokens(1, seed=2 + step))
    pair.same()
    for accepted in (0, 2, 3, 1):
        drafted = tokens(3, seed=20 + accepted)
        pair.run(drafted, rows="all")
        pair.each("rewind", 3 - accepted)
        pair.run(tokens(1, seed=30 + accepted))
    pair.same()
    pair.run(tokens(5, seed=10), commit=True, rows="all")
    pair.run(tokens(2, seed=11), rows=[1, 0])
    pair.same()


@pytest.mark.parametrize("case", ["mamba1", "hybrid-w8a8"])
def test_several_sequences_and_forks(case: str) -> None:
    pair = Pair(trio(*CASES[case]), batch=2)
    pair.run(tokens(7, 2, seed=1), commit=True, rows="all")
    pair.run(tokens(2, 2, seed=2), rows="all")
    pair.each("rewind", 1)
    pair.run(tokens(1, 2, seed=3))
    pair.same()
    alone = Pair(pair.made)
    alone.run(tokens(5, seed=4), commit=True)
    alone.run(tokens(2, seed=5))
    wide = Pair(pair.made, batch=3)
    wide.ours, wide.theirs = alone.ours.fork(3), alone.theirs.fork(3)
    assert wide.ours.reach == 2
    wide.run(tokens(2, 3, seed=6), rows="all")
    wide.each("rewind", 3)
    wide.same()
    alone.run(tokens(1, seed=7))
    alone.same()


@pytest.mark.parametrize("case", ["mamba1", "mamba1-w8a8", "hybrid-w8a8"])
def test_the_likeliest_token_and_the_cuda_engine(case: str) -> None:
    """The same plan's own launches, interpreted; a state moves from one engine to the other."""
    made = trio(*CASES[case])
    ours = made.tensorrt.new_state(window=2, capacity=CAPACITY)
    theirs = made.cuda.new_state(window=2, capacity=CAPACITY)
    made.tensorrt.run(tokens(9, seed=1), ours, commit=True)
    theirs.restore(ours.snapshot())
    found = made.tensorrt.run(tokens(1, seed=2), ours).copy()
    close(found, made.cuda.run(tokens(1, seed=2), theirs), rounded=made.rounded)
    same_arrays(ours.arrays(), theirs.arrays(), made.rounded)
    ours.rewind(1)
    picked = made.tensorrt.run_greedy(tokens(1, seed=2), ours)
    assert picked == found[0, 0].argmax()
    assert ours.position == 10 and ours.reach == 1


def test_state_files_are_those_of_the_other_engines(tmp_path: Path) -> None:
    pair = Pair(trio(*CASES["hybrid-w8a8"]))
    pair.run(tokens(6, seed=1), commit=True)
    pair.run(tokens(2, seed=2))
    pair.ours.save(tmp_path / "ours", {"by": "tensorrt"})
    pair.theirs.save(tmp_path / "theirs", {"by": "ort"})
    other = Pair(pair.made)
    assert other.ours.load(tmp_path / "theirs") == {"by": "ort"}
    assert other.theirs.load(tmp_path / "ours") == {"by": "tensorrt"}
    other.same()
    other.run(tokens(2, seed=3), rows="all")


def test_the_last_rows_alone_are_enough() -> None:
    """With an engine whose caches slide, and whole caches full of NaN."""
    made = trio(*CASES["hybrid-w8a8"])
    theirs = made.cuda.new_state(window=3, capacity=CAPACITY)
    for seed in range(4):
        made.cuda.run(tokens(9, seed=seed), theirs, commit=True)
    ours = made.tensorrt.new_state(window=3, capacity=CAPACITY)
    assert theirs.layout.slots is not None and ours.layout.slots is None
    with made.tensorrt.exclusive as device:
        device.fill(ours.caches, 0, ours.caches.nbytes, 0xFF)
    ours.restore(theirs.snapshot())
    found = made.tensorrt.run(tokens(1, seed=9), ours).copy()
    close(found, made.cuda.run(tokens(1, seed=9), theirs), rounded=made.rounded)


# -- any order ------------------------------------------------------------------------------------


class VerbsMachine(RuleBasedStateMachine):
    """Every verb that both engines have, in any order, beside `ort`."""

    @initialize(
        case=st.sampled_from(["mamba1", "hybrid"]),
        batch=st.sampled_from([1, 2]),
        window=st.sampled_from([1, 2, 4]),
        in_place=st.booleans(),
    )
    def start(self, case: str, batch: int, window: int, in_place: bool) -> None:
        made = trio({"mamba1": "mamba1", "hybrid": "all"}[case], "fp32")
        self.pair = Pair(made, window=window, batch=batch, in_place=in_place)
        self.window, self.batch, self.seed = window, batch, 0
        self.saved: list[tuple[Snapshot, Snapshot]] = []

    def run(self, count: int, **how: object) -> None:
        self.seed += 1
        if self.pair.ours.position + count <= CAPACITY:
            self.pair.run(tokens(count, self.batch, self.seed), **how)

    @rule()
    def step(self) -> None:
        self.run(1)

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        self.run(data.draw(st.integers(1, self.window)), rows="all")

    @rule(count=st.integers(1, 20), rows=st.sampled_from(["last", "all"]))
    def prefill(self, count: int, rows: str) -> None:
        self.run(count, rows=rows, commit=True)

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        reach = min(self.pair.ours.reach, self.pair.theirs.reach)
        self.pair.each("rewind", data.draw(st.integers(0, reach)))

    @rule()
    def clear(self) -> None:
        self.pair.each("clear")

    @rule()
    def snapshot(self) -> None:
        self.pair.same()
        self.saved.append((self.pair.ours.snapshot(), self.pair.theirs.snapshot()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), crossed=st.booleans())
    def restore(self, data: st.DataObject, crossed: bool) -> None:
        ours, theirs = data.draw(st.sampled_from(self.saved))
        self.pair.ours.restore(theirs if crossed else ours)
        self.pair.theirs.restore(theirs)

    @rule()
    def fork(self) -> None:
        ours, theirs = self.pair.ours, self.pair.theirs
        self.pair.ours, self.pair.theirs = ours.fork(), theirs.fork()
        ours.clear()
        assert isinstance(self.pair.ours, DeviceState)

    @rule()
    def save_and_load(self) -> None:
        engine, sizes = self.pair.engine, {"window": self.window, "batch": self.batch}
        with tempfile.TemporaryDirectory() as folder:
            self.pair.ours.save(Path(folder) / "state", {"turns": 3})
            self.pair.ours = engine.new_state(**sizes, capacity=CAPACITY)
            assert self.pair.ours.load(Path(folder) / "state") == {"turns": 3}

    @rule()
    def run_that_fails(self) -> None:
        """The failed run's writes are invisible."""
        state, engine = self.pair.ours, self.pair.engine
        device, wait = engine.exclusive.device, engine.exclusive.device.wait
        if state.position + self.window > CAPACITY:
            return

        def spoiled() -> None:
            wait()
            state.workspace.out[:] = 0xFF

        device.wait = spoiled  # type: ignore[method-assign]
        try:
            with pytest.raises(EngineError, match="not finite"):
                engine.run(tokens(self.window, self.batch, 99), state)
        finally:
            device.wait = wait  # type: ignore[method-assign]

    @invariant()
    def where_it_is(self) -> None:
        assert self.pair.ours.position == self.pair.theirs.position
        assert self.pair.ours.reach <= self.window


def test_verbs_in_any_order() -> None:
    run_state_machine_as_test(
        VerbsMachine, settings=settings(max_examples=6, stateful_step_count=15)
    )


# -- memory of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tensorrt", "rtx"])
def test_recorded_runs_have_contexts_of_their_own_and_others_share(kind: Kind) -> None:
    made = trio(*CASES["mamba1"])
    engine = tensorrt_engine(made.cuda, made.graph, kind)
    state, found = engine.new_state(window=2), native(engine)
    assert not found.contexts and not found.ran, "a state that nothing ran takes none"

    def steps_and_pairs() -> None:
        for _ in range(3):
            engine.run(tokens(1), state)
        engine.run_greedy(tokens(1), state)  # in the context of a step
        engine.run(tokens(2), state, rows="all")

    steps_and_pairs()
    told = [context.told for context in found.contexts]
    assert len(told) == 2
    steps_and_pairs()
    assert told == [context.told for context in found.contexts], "not told again"
    graphs = [each.graph is not None for each in state.workspace.prepared.values()]
    assert graphs == [True] * 3, "recorded when run again"
    engine.run(tokens(7), state, commit=True)
    engine.run(tokens(9), state, commit=True)
    assert len(found.contexts) == 3
    other = engine.new_state(window=1)
    engine.run(tokens(7), other, commit=True)
    assert len(found.contexts) == 3, "one for all that is not recorded"
    engine.run(tokens(1), other)
    assert len(found.contexts) == 4


@pytest.mark.parametrize("kind", ["tensorrt", "rtx"])
def test_all_logits_of_a_chunk_move_the_values_and_nothing_else(kind: Kind) -> None:
    """More than was planned for: outputs move, and no rehearsal damages the state."""
    made = trio(*CASES["mamba1-w8a8"])
    engine = tensorrt_engine(made.cuda, made.graph, kind)
    state, theirs = engine.new_state(window=2), made.ort.new_state(window=2)
    arena, found = state.workspace.arena, native(engine)
    for count, how in ((3, {}), (40, {"rows": "all"}), (1, {}), (1, {"commit": False})):
        how = {"commit": True, **how}
        enqueued, ids = len(found.ran), tokens(count, seed=count)
        close(engine.run(ids, state, **how), made.ort.run(ids, theirs, **how), rounded=True)
        assert len(found.ran) == enqueued + 1
    assert state.workspace.arena is not arena
    same_arrays(state.arrays(), theirs.arrays(), True)


def test_the_memory_plan_is_what_a_state_takes() -> None:
    made = trio(*CASES["hybrid-w8a8"])
    plan = made.tensorrt.memory_plan(batch=2, window=3, capacity=30)
    state = made.tensorrt.new_state(batch=2, window=3, capacity=30)
    workspace = state.workspace
    assert plan["state_ring"] + plan["kv_cache"] == state.nbytes
    assert plan["logits"] == workspace.out.nbytes
    assert plan["workspace"] >= workspace.memory.nbytes + made.tensorrt.executor.scratch_bytes
    file = len(ort_tensorrt.serialized(made.graph, made.tensorrt.executor.sizes))
    launched = made.tensorrt.executor.launches.weights_bytes
    assert plan["weights"] == launched + file
    assert launched < made.cuda.executor.weights_bytes, "what settling reads alone"


@pytest.mark.parametrize(
    ("sizes", "field", "option"),
    [
        ({"window": 5}, "window", "--window 5"),
        ({"batch": 4}, "batch", "--batch 4"),
        ({"capacity": 65}, "capacity", "--capacity 65"),
    ],
)
def test_states_that_the_engine_was_not_built_for(
    sizes: dict[str, int], field: str, option: str
) -> None:
    engine = trio("all", "fp32").tensorrt
    with pytest.raises(EngineError, match="was built for at most") as caught:
        engine.new_state(**{"window": 1, "capacity": 8, **sizes})
    assert caught.value.field == field
    assert caught.value.remedy is not None and option in caught.value.remedy
    assert "edge build BUNDLE" in caught.value.remedy and "--window" in caught.value.remedy
    state = engine.new_state(batch=1, window=1, capacity=8)
    if field == "batch":
        with pytest.raises(EngineError, match="was built for"):
            state.fork(4)


def test_a_capacity_that_is_not_asked_for_is_what_was_built() -> None:
    made = trio("all", "fp32")
    assert made.cuda.config.max_context is None
    assert made.tensorrt.new_state(window=1).layout.capacity == CAPACITY
    plans = [made.tensorrt.memory_plan(window=1, capacity=size) for size in (None, CAPACITY)]
    assert plans[0] == plans[1]


def test_what_only_plugins_can_do_is_refused() -> None:
    engine = trio(*CASES["mamba1"]).tensorrt
    state = engine.new_state(window=3)
    engine.run(tokens(2), state)
    with pytest.raises(InputError, match="only chains"):
        engine.run(tokens(3), state, parents=[-1, 0, 0], rows="all")
    assert state.position == 2 and state.tree is None


def test_states_of_another_engine() -> None:
    made = trio(*CASES["mamba1"])
    assert isinstance(made.tensorrt, CudaEngine) and made.tensorrt.name == "tensorrt"
    with pytest.raises(StateError, match="another engine"):
        made.tensorrt.run(tokens(1), made.cuda.new_state())
    with pytest.raises(StateError, match="another engine"):
        made.cuda.run(tokens(1), made.tensorrt.new_state(window=2))
