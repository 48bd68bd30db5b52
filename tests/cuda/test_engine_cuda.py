"""The CUDA engine around its runs: memory allocated once, errors, threads, processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter

import numpy as np
import pytest

from edge.errors import BundleError, EngineError, InputError, StateError
from edge.launch import Buffer, Size, Weight
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda import opening, weights
from edge.runtime.cuda.device import STAGING, Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.inputs import Sources
from edge.runtime.engine import Engine
from tests.cuda import toy

pytestmark = pytest.mark.without_gpu


class CountingDevice(InterpretDevice):
    """A device that counts calls."""

    def __init__(self) -> None:
        super().__init__(toy.PACKAGE)
        self.calls: Counter[str] = Counter()

    def allocate(self, nbytes):  # type: ignore[no-untyped-def]
        self.calls["allocate"] += 1
        return super().allocate(nbytes)

    def host(self, nbytes):  # type: ignore[no-untyped-def]
        self.calls["host"] += 1
        return super().host(nbytes)

    def launch(self, kernel, grid, arguments):  # type: ignore[no-untyped-def]
        self.calls["launch"] += 1
        super().launch(kernel, grid, arguments)

    def write(self, target, at, source):  # type: ignore[no-untyped-def]
        self.calls["write"] += 1
        super().write(target, at, source)


def ids(count: int, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(count).integers(0, toy.V, (batch, count))


def test_it_is_an_engine() -> None:
    assert isinstance(toy.engine(), Engine)


def test_a_step_is_one_recorded_graph_and_takes_no_memory() -> None:
    device = CountingDevice()
    engine = toy.engine(device)
    state = engine.new_state(window=4)
    device.calls.clear()
    for _ in range(6):
        engine.run(ids(1), state)
    engine.run(ids(3), state, rows="all")
    engine.run(ids(4), state, parents=[-1, 0, 0, 1], rows="all")
    state.select(3)
    engine.run(ids(20), state, commit=True)
    state.snapshot()
    assert not device.calls, "everything was recorded when the state was made"
    engine.run(ids(7), state, commit=True)
    state.rewind(0)
    assert set(device.calls) == {"launch", "write"} and device.calls["write"] == 1
    launches = len(engine.plan.programs[3].launches)
    assert device.calls["launch"] == launches
    engine.run(ids(7), state, commit=True, rows=[6, 0])
    assert device.calls["allocate"] == device.calls["host"] == 0


def test_all_logits_of_a_chunk_take_room_once() -> None:
    device = CountingDevice()
    engine = toy.engine(device)
    state = engine.new_state(window=2)
    sequence: list[int] = []
    for count in (20, 1, 20, 17, 2):
        new = ids(count)
        before, taken = len(sequence), device.calls["allocate"] + device.calls["host"]
        sequence += new[0].tolist()
        found = engine.run(new, state, rows="all", commit=True)
        assert np.array_equal(found[0], toy.expected(sequence)[0][before:])
    assert device.calls["allocate"] + device.calls["host"] == taken


@pytest.mark.parametrize(("batch", "window", "capacity"), [(1, 8, None), (3, 2, 30)])
def test_the_plan_is_what_a_state_takes(batch: int, window: int, capacity: int | None) -> None:
    engine = toy.engine()
    plan = engine.memory_plan(batch=batch, window=window, capacity=capacity)
    state = engine.new_state(batch=batch, window=window, capacity=capacity)
    assert state.recurrent is not None and state.caches is not None
    assert plan["state_ring"] == state.recurrent.nbytes
    assert plan["kv_cache"] == state.caches.nbytes
    assert plan["state_ring"] + plan["kv_cache"] == state.nbytes
    workspace = state.workspace
    assert plan["logits"] == workspace.out.nbytes
    assert plan["workspace"] == workspace.arena.nbytes + workspace.memory.nbytes
    parts = ("weights", "state_ring", "kv_cache", "logits", "workspace")
    assert plan["total"] == sum(plan[part] for part in parts)
    snapshot = state.snapshot()
    assert snapshot.nbytes == plan["state"]
    assert plan["snapshot"] > plan["state"]


def test_states_share_the_values_of_their_runs() -> None:
    engine = toy.engine()
    states = [engine.new_state(window=2) for _ in range(3)]
    assert len({id(state.workspace.arena) for state in states}) == 1
    sequences: list[list[int]] = [[], [], []]
    for turn in range(6):
        new = ids(1 + turn % 2)
        sequences[turn % 3] += new[0].tolist()
        found = engine.run(new, states[turn % 3])
        assert np.array_equal(found[0, 0], toy.expected(sequences[turn % 3])[0][-1])
    assert np.array_equal(engine.run(ids(1, 2), engine.new_state(batch=2))[0, 0],
                          toy.expected(ids(1, 2)[0])[0][-1])  # fmt: skip


def test_what_is_refused() -> None:
    engine, other = toy.engine(), toy.engine()
    state = engine.new_state(window=4)
    for wrong in ({"batch": 0}, {"window": 0}, {"window": 257}, {"capacity": 65}):
        with pytest.raises(InputError):
            engine.new_state(**wrong)
    with pytest.raises(StateError, match="another engine"):
        other.run(ids(1), state)
    with pytest.raises(InputError, match="window"):
        engine.run(ids(5), state)
    with pytest.raises(InputError, match="chunk"):
        engine.run(ids(21), state, commit=True)
    wide = engine.new_state(batch=6, window=4)
    with pytest.raises(InputError, match="at most 16") as caught:
        engine.run(ids(3, 6), wide, parents=[-1, 0, 0])
    assert caught.value.field == "parents"
    assert wide.position == 0
    engine.run(ids(2, 6), wide, parents=[-1, 0])


def test_two_threads() -> None:
    engine = toy.engine()
    state, mine = engine.new_state(window=2), engine.new_state(window=2)
    inside, leave = threading.Event(), threading.Event()
    device = engine.exclusive.device
    wait = device.wait

    def slow() -> None:
        wait()
        inside.set()
        assert leave.wait(60)

    device.wait = slow  # type: ignore[method-assign]
    first = threading.Thread(target=engine.run, args=(ids(1), state))
    first.start()
    assert inside.wait(60)
    device.wait = wait  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="another thread"):
        engine.run(ids(1), state)
    with pytest.raises(EngineError, match="another thread"):
        state.clear()
    second = threading.Thread(target=engine.run, args=(ids(1), mine))
    second.start()
    assert mine.position == 0, "runs follow one another"
    leave.set()
    for thread in (first, second):
        thread.join(60)
    assert (state.position, mine.position) == (1, 1)


def test_an_interrupted_run_is_waited_for_before_its_inputs_are_written_over() -> None:
    engine = toy.engine()
    state = engine.new_state(window=2)
    device, order = engine.exclusive.device, []
    wait, fill = device.wait, engine.sources.fill

    def interrupted() -> None:
        device.wait = waited  # type: ignore[method-assign]
        raise KeyboardInterrupt

    def waited() -> None:
        order.append("wait")
        wait()

    def filled(*arguments: object) -> None:
        order.append("fill")
        fill(*arguments)  # type: ignore[arg-type]

    device.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.run(ids(1), state)
    engine.sources.fill = filled  # type: ignore[method-assign]
    assert state.position == 0
    engine.run(ids(2), state)
    assert order == ["wait", "fill", "wait"]


def test_a_forked_process_is_refused() -> None:
    engine = toy.engine()
    state = engine.new_state(window=2)
    child = os.fork()
    if child == 0:
        caught = 0
        for verb in (lambda: engine.run(ids(1), state), engine.new_state, state.clear,
                     state.snapshot):  # fmt: skip
            try:
                verb()
            except EngineError as problem:
                caught += "forked" in str(problem)
        os._exit(0 if caught == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.run(ids(1), state)


def test_no_memory_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy.engine()

    def allocate(nbytes: int) -> object:
        raise EngineError(f"no memory for {nbytes} bytes")

    monkeypatch.setattr(engine.exclusive.device, "allocate", allocate)
    with pytest.raises(StateError, match="no memory") as caught:
        engine.new_state()
    assert caught.value.remedy


def test_an_input_this_version_does_not_make() -> None:
    plan = toy.plan()
    for name, dtype in (("future", "i32"), ("run", "f32"), ("rope0.cos", "f32")):
        buffer = Buffer(dtype=dtype, elements=Size(times=8))
        with pytest.raises(BundleError, match="does not provide") as caught:
            Sources(plan.model_copy(update={"inputs": {**plan.inputs, name: buffer}}))
        assert caught.value.field == f"inputs.{name}"


# -- weights -------------------------------------------------------------------------------------


def weight(offset: int, nbytes: int) -> Weight:
    return Weight(dtype="i8", offset=offset, elements=nbytes)


def test_segments_end_where_weights_do() -> None:
    table = {
        "a": weight(64, 300), "b": weight(384, 600), "shared": weight(448, 500),
        "far": weight(8192, 10), "large": weight(8448, 5000), "next": weight(13504, 1),
    }  # fmt: skip
    found = [(s.start, s.end) for s in weights.segments(table, largest=1000)]
    assert found == [(0, 984), (8192, 8202), (8448, 13448), (13312, 13505)]
    for each in table.values():
        assert any(s <= each.offset and each.offset + each.elements <= e for s, e in found)
    assert [(s.start, s.end) for s in weights.segments(table)] == [(0, 984), (8192, 13505)]


def test_weights_arrive_whole_whatever_the_blocks() -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * STAGING // 2, dtype=np.uint8)
    table = {"a": weight(64, 100), "b": weight(4096, STAGING), "c": weight(len(data) - 7, 7)}
    plan = toy.plan().model_copy(update={"weights": table})
    device = InterpretDevice(toy.PACKAGE)
    exclusive = Exclusive(device)
    made = weights.DeviceWeights(plan, exclusive)
    cuts = [0, 3, 70, 5000, STAGING, len(data)]
    made.read(data[a:b].tobytes() for a, b in itertools.pairwise(cuts))
    for name, each in table.items():
        address, part = made.address(name), data[each.offset : each.offset + each.elements]
        assert address % 64 == each.offset % 64
        memory = next(m for m in device.memories if m.address <= address < m.address + m.nbytes)
        assert np.array_equal(memory.part(address - memory.address, len(part)), part)
    with pytest.raises(BundleError, match="ends at byte"):
        made.read([data[:-1].tobytes()])


# -- devices ---------------------------------------------------------------------------------------


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_DEVICE", "interpret")
    assert opening.open_device().sm == 0
    monkeypatch.setenv("EDGE_DEVICE", "tpu")
    with pytest.raises(EngineError, match="neither a number") as caught:
        opening.open_device()
    assert caught.value.field == "EDGE_DEVICE"


def test_an_engine_is_freed_with_its_last_reference() -> None:
    device = InterpretDevice(toy.PACKAGE)
    engine: CudaEngine | None = toy.engine(device)
    assert engine is not None
    state = engine.new_state(window=2)
    engine.run(ids(1), state)
    del engine, state
    assert not device.memories
