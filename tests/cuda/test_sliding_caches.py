"""Sliding KV caches give the same bits as whole ones in every operation, far past the window."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edge.plugins.cpu import library
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.state import DeviceState
from edge.runtime.engine import JointStep
from tests import on_device, quantized_models
from tests.cuda.models import sliding_and_whole, spoil_caches, tiny_engine

pytest_generate_tests = on_device.parametrize
V = quantized_models.V
CHUNK, LONG, SHORT = 7, 80, 40


class Pair:
    """A state with sliding caches and one that keeps everything; both do the same."""

    def __init__(
        self, name: str, quant: str, window: int, batch: int = 1, capacity: int = SHORT
    ) -> None:
        self.engines = sliding_and_whole(name, quant, CHUNK)
        self.window, self.batch, self.capacity = window, batch, capacity
        self.states = [self.new(index) for index in range(2)]
        assert self.states[0].layout.slots is not None
        assert self.states[0].nbytes < self.states[1].nbytes

    def new(self, index: int, batch: int | None = None, window: int | None = None) -> DeviceState:
        return self.engines[index].new_state(
            batch=batch or self.batch, window=window or self.window, capacity=self.capacity
        )

    def run(self, ids: np.ndarray, parents: list[int] | None = None, commit: bool = False) -> None:
        slid, whole = (
            engine.run(ids, state, parents=parents, rows="all", commit=commit).copy()
            for engine, state in zip(self.engines, self.states, strict=True)
        )
        assert slid.tobytes() == whole.tobytes()
        if parents is None:
            spoil_caches(self.engines[0], self.states[0])

    def check(self) -> None:
        """Compare their states over the tokens that both keep."""
        slid, whole = (state.arrays() for state in self.states)
        for name, array in slid.items():
            theirs = whole[name]
            if self.states[0].layout.slides(name):
                needed = min(self.states[0].position, self.states[0].layout.looks_back - 1)
                assert array.shape[2] == needed
                theirs = theirs[:, :, theirs.shape[2] - needed :]
            assert array.tobytes() == theirs.tobytes(), name


def walk(pair: Pair, rng: random.Random, folder: Path) -> None:
    """Do one operation on both."""
    slid, whole = pair.states
    left = pair.capacity - slid.position
    ids = np.asarray(
        [[rng.randrange(V) for _ in range(pair.window + CHUNK)] for _ in range(pair.batch)]
    )
    verb = rng.choice(["commit", "commit", "steps", "run", "tree", "back", "copy", "swap", "file"])
    if verb == "commit":
        pair.run(ids[:, : rng.randint(1, min(CHUNK, left))], commit=True)
    elif verb == "steps":
        for index in range(min(4, left)):
            pair.run(ids[:, index : index + 1])
    elif verb == "run":
        pair.run(ids[:, : rng.randint(1, min(pair.window, left))])
    elif verb == "tree":
        count = min(pair.window, left)
        parents = [rng.randint(-1, node - 1) for node in range(count)]
        pair.run(ids[:, :count], parents)
        node = rng.randint(-1, count - 1)
        for state in pair.states:
            state.select(node)
    elif verb == "back":
        assert slid.reach == whole.reach
        count = rng.randint(0, slid.reach)
        for state in pair.states:
            state.rewind(count)
    elif verb == "copy":
        pair.states = [state.fork() for state in pair.states]
    elif verb == "swap":  # each continues from the other's snapshot, in a used state
        snapshots = [state.snapshot() for state in pair.states]
        slid.restore(snapshots[rng.randint(0, 1)])
        whole.restore(snapshots[rng.randint(0, 1)])
    else:
        for index, state in enumerate(pair.states):
            state.save(folder / str(index), {"at": state.position})
        for state, name in zip(pair.states, rng.sample(["0", "1"], 2), strict=True):
            assert state.load(folder / name) == {"at": slid.position}


@pytest.mark.parametrize(
    ("name", "quant", "window", "batch"),
    [
        ("attention odd", "fp32", 3, 1),
        ("short", "fp32", 1, 2),
        ("parallel", "w8", 5, 3),
        ("all", "fp32", 4, 1),
        ("attention odd", "w8a8", 9, 1),
    ],
)
def test_whatever_is_done_the_bits_are_those_of_whole_caches(
    where: str, tmp_path: Path, name: str, quant: str, window: int, batch: int
) -> None:
    interpreted = where == on_device.INTERPRETED
    if interpreted and (quant, batch) != ("fp32", 2):
        pytest.skip("takes minutes, and attention is the same")
    pair = Pair(name, quant, window, batch, SHORT if interpreted else LONG)
    rng, moves = random.Random(f"{name} {batch}"), 0
    first = 0
    while pair.states[0].position < pair.capacity - 5:
        walk(pair, rng, tmp_path)
        moves += pair.states[0].ledger.first > first
        first = pair.states[0].ledger.first
    pair.check()
    assert moves > (0 if interpreted else 2), "the caches have moved"
    for state in pair.states:
        state.clear()
    pair.run(np.full((batch, CHUNK), 3), commit=True)
    pair.check()


def test_spread_over_more_sequences_and_other_sizes(where: str) -> None:
    pair = Pair("attention odd", "fp32", 3, capacity=60)
    ids = np.random.default_rng(5).integers(0, V, (1, 21))
    for start in range(0, 21, CHUNK):
        pair.run(ids[:, start : start + CHUNK], commit=True)
    pair.run(ids[:, :2])
    assert pair.states[0].ledger.first, "the caches have moved"
    wide = [pair.new(index, batch=3, window=6) for index in range(2)]
    used = np.random.default_rng(6).integers(0, V, (3, CHUNK))
    for state, target, engine in zip(pair.states, wide, pair.engines, strict=True):
        engine.run(used, target, commit=True)
        state.spread(target)
    pair.states, pair.batch = wide, 3
    for start in range(0, 21, CHUNK):
        pair.run(np.repeat(ids[:, start : start + CHUNK], 3, 0), commit=True)
    pair.check()


@pytest.mark.skipif(library.path() is None, reason="needs the kernels for CPUs")
def test_joint_steps_make_room_for_each_state() -> None:
    with on_device.running(library.instruction_sets()[-1]):
        slid, whole = sliding_and_whole("attention odd", "fp32", CHUNK)
    assert isinstance(slid, CpuEngine)
    rng, pairs = np.random.default_rng(8), []
    for length in (2, 7, 5):
        pair = [engine.new_state(window=3, capacity=LONG) for engine in (slid, whole)]
        for engine, state in zip((slid, whole), pair, strict=True):
            engine.run(np.full((1, length), 4), state, commit=True)
        pairs.append(pair)
    for index, ids in enumerate(rng.integers(0, V, (80, 3))):
        chosen = [n for n in range(3) if (index + n) % 4]
        found = slid.step_jointly([JointStep(int(ids[n]), pairs[n][0]) for n in chosen])
        for n, row in zip(chosen, found, strict=True):
            assert isinstance(row, np.ndarray)
            assert row.tobytes() == whole.run(np.asarray([[ids[n]]]), pairs[n][1]).tobytes()
    assert min(pair[0].ledger.first for pair in pairs) > 21


def test_a_short_context_is_kept_whole(where: str) -> None:
    engine: CudaEngine = tiny_engine("attention odd", "fp32")
    layout = engine.new_state(window=3, capacity=40).layout
    assert layout.slots is None and {shape[2] for shape in layout.caches.values()} == {40}
