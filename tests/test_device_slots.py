"""States whose slots have copies on a device: results do not change, and steps copy no state.

There is no GPU here, so the device is the CPU: the copies are other memory all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped]
    OrtDevice,
    OrtValue,
)

from edge.errors import StateError
from edge.runtime import device_slots
from edge.runtime.buffers import StateBuffers
from edge.runtime.device_slots import DeviceSlots, Span
from edge.runtime.ort import OrtEngine
from tests.engine_models import ALL_KINDS, config_of, engine
from tests.facts import facts

DEVICE = OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)
WINDOW = 4


def on_device(kind: str) -> OrtEngine:
    """Return an engine with the session of the usual one, whose states have copies."""
    out = copy.copy(engine(kind))
    out.device = DEVICE
    return out


class Pair:
    """A state without copies and one with, to which the same is done."""

    def __init__(self, kind: str, batch: int = 1) -> None:
        capacity = 40 if config_of(kind).has_attention else None
        self.batch, self.kind = batch, kind
        self.engines = engine(kind), on_device(kind)
        self.states = [
            each.new_state(batch=batch, window=WINDOW, capacity=capacity) for each in self.engines
        ]
        self.seed = 0

    def run(self, count: int, parents: list[int] | None = None, commit: bool = False) -> None:
        self.seed += 1
        ids = np.random.default_rng(self.seed).integers(0, 40, (self.batch, count))
        plain, copied = (
            each.run(ids, state, rows="all", parents=parents, commit=commit).copy()
            for each, state in zip(self.engines, self.states, strict=True)
        )
        assert np.array_equal(plain, copied)

    def both(self, verb: Callable[[StateBuffers], object]) -> None:
        for state in self.states:
            verb(state)

    def check(self) -> None:
        plain, copied = (state.arrays() for state in self.states)
        assert plain.keys() == copied.keys()
        for name, array in plain.items():
            assert np.array_equal(array, copied[name]), name


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_verb_gives_the_same_bits(kind: str, tmp_path: Path) -> None:
    pair = Pair(kind)
    pair.run(7, commit=True)
    for _ in range(3):
        pair.run(1)
    snapshots = [state.snapshot() for state in pair.states]
    pair.both(lambda state: state.rewind(2))
    pair.run(WINDOW)
    pair.run(4, parents=[-1, 0, 0, 2])
    pair.both(lambda state: state.select(3))
    pair.run(1)
    pair.check()
    pair.run(2)
    # from the other state's snapshot, in either direction
    for state, snapshot in zip(pair.states, reversed(snapshots), strict=True):
        state.restore(snapshot)
    pair.run(2)
    pair.states = [state.fork() for state in pair.states]
    pair.both(lambda state: state.rewind(1))
    pair.run(1)
    pair.both(lambda state: state.save(tmp_path / f"{id(state)}"))
    files = [tmp_path / f"{id(state)}" for state in pair.states]
    pair.both(lambda state: state.clear())
    pair.run(3)
    for state, file in zip(pair.states, reversed(files), strict=True):
        state.load(file)
    pair.run(1, commit=True)
    pair.check()
    wide = Pair(kind, batch=2)
    for state, to in zip(pair.states, wide.states, strict=True):
        state.spread(to)
    wide.run(1)
    wide.states[0].restore(wide.states[1].snapshot())
    wide.run(2)
    wide.check()


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_steps_and_rewinds_use_the_copies_only(kind: str) -> None:
    pair = Pair(kind)
    pair.run(5, commit=True)
    state = pair.states[1]
    for _ in range(12):
        for array in (*state.rings.values(), *state.bases.values()):
            array[...] = 77
        pair.run(2)
        pair.both(lambda state: state.rewind(1))
    pair.run(5, commit=True)
    pair.check()


def test_a_slot_is_copied_once_and_only_where_it_is_newer() -> None:
    arrays = {"a": np.arange(24, dtype=np.float16).reshape(4, 2, 3), "b": np.zeros((2, 5), np.int8)}
    slots = DeviceSlots(arrays, DEVICE)
    first, second = Span(slice(0, 2), slice(0, 1)), Span(slice(0, 2), slice(1, 2))
    slots.prepare([first], [second])
    sent = slots.view("a", 0).numpy()
    assert np.array_equal(sent, arrays["a"][0]) and sent.dtype == np.float16
    arrays["a"][0] = 50
    slots.prepare([first], [])
    assert slots.view("a", 0).numpy()[0, 0] == 0  # nobody said that it was overwritten
    slots.replace("a", 0)
    slots.prepare([first], [])
    assert slots.view("a", 0).numpy()[0, 0] == 50
    # a run has written the second slot
    slots.view("b", 1).update_inplace(np.full(5, 9, np.int8))
    slots.fetch("b", 1)
    assert (arrays["b"] == [[0] * 5, [9] * 5]).all()
    arrays["b"][1] = 3
    slots.fetch("b", 1)
    assert (arrays["b"][1] == 3).all()


def test_parts_share_the_memory_and_may_be_empty() -> None:
    slots = DeviceSlots({"a": np.zeros((3, 4), np.uint8)}, DEVICE)
    whole, part = slots.view("a", 0, 3), slots.view("a", 1, 2)
    part.update_inplace(np.arange(8, dtype=np.uint8).reshape(2, 4))
    assert whole.numpy()[1:].ravel().tolist() == list(range(8))
    assert part.data_ptr() - whole.data_ptr() == 4
    assert slots.view("a", 0, 0).shape() == [0, 4]
    for _ in range(1000):
        slots.view("a", 2)


def test_too_little_memory_on_the_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    full = MagicMock(spec=OrtValue)
    full.ortvalue_from_shape_and_type.side_effect = RuntimeError("out of memory")
    monkeypatch.setattr(device_slots, "OrtValue", full)
    with pytest.raises(StateError, match=facts("12 bytes", "GPU", "out of memory")):
        DeviceSlots({"a": np.zeros((3, 4), np.uint8)}, DEVICE)
