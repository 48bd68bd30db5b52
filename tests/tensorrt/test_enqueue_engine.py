"""The tensorrt engine with its plugins: all of it but TensorRT, which calls them node by node.

States, books, bindings and trees are the engine's own; what it runs has the bits of the CUDA
engine's launches. `test_engine_models.py` shows the same engine where outputs are not in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import InputError
from tests.cuda.models import poison, tokens
from tests.on_device import NOTES, ON_GPU
from tests.tensorrt.plugin_contexts import PluginContexts, tensorrt_engine
from tests.tensorrt.plugin_host import whole
from tests.tensorrt.plugin_models import CAPACITY, CHUNK, memory_of, model
from tests.tensorrt.test_enqueue_models import CASES


class Pair:
    """A state of each engine; whatever is done to one is done to the other, and compared."""

    def __init__(self, case: str, window: int, batch: int = 1) -> None:
        if not ON_GPU and not NOTES:
            whole()
        made = model(*CASES[case])
        self.engines = (made.engine, tensorrt_engine(made))
        self.states = tuple(
            engine.new_state(batch=batch, window=window, capacity=CAPACITY)
            for engine in self.engines
        )
        contexts = self.engines[1].executor.contexts  # type: ignore[attr-defined]
        assert isinstance(contexts, PluginContexts)
        self.enqueued = contexts.enqueued

    def run(self, ids: np.ndarray, **how: Any) -> None:
        before, found = len(self.enqueued), []
        for engine, state in zip(self.engines, self.states, strict=True):
            poison(engine, state)
            found.append(engine.run(ids, state, rows="all", **how).copy())
        assert np.array_equal(*found)
        assert len(self.enqueued) == before + 1
        self.same()

    def each(self, verb: str, *arguments: Any) -> None:
        for state in self.states:
            getattr(state, verb)(*arguments)

    def same(self) -> None:
        plan, plugins = self.states
        assert plugins.ledger == plan.ledger
        assert memory_of(plugins) == memory_of(plan)


@pytest.mark.parametrize("case", ["mamba1-w8a8", "mamba2-fp16", "attention"])
def test_every_verb_has_the_bits_of_the_cuda_engine(case: str, tmp_path: Path) -> None:
    pair = Pair(case, window=3)
    pair.run(tokens(CHUNK, seed=1), commit=True)
    pair.run(tokens(1, seed=2))
    pair.run(tokens(3, seed=3))  # the oldest is applied for good
    pair.each("rewind", 2)
    pair.run(tokens(3, seed=4), parents=[-1, 0, 0])
    pair.each("select", 2)
    # each takes the other's snapshot, each loads the other's file
    first, second = (state.snapshot() for state in pair.states)
    pair.states[0].restore(second)
    pair.states[1].restore(first)
    pair.run(tokens(2, seed=5))
    for number, state in enumerate(pair.states):
        state.save(tmp_path / str(number), {})
    for number, state in enumerate(pair.states):
        state.load(tmp_path / str(1 - number))
    pair.run(tokens(1, seed=6))
    picked = [
        engine.run_greedy(tokens(1, seed=7), state)
        for engine, state in zip(pair.engines, pair.states, strict=True)
    ]
    assert np.array_equal(*picked)
    pair.each("clear")
    pair.run(tokens(5, seed=8), commit=True)


def test_a_tree_of_several_sequences_has_the_bits_of_the_cuda_engine() -> None:
    pair = Pair("attention", window=4, batch=2)
    pair.run(tokens(8, batch=2, seed=1), commit=True)
    pair.run(tokens(4, batch=2, seed=2), parents=[-1, -1, 0, 2])
    pair.each("select", 3)
    pair.run(tokens(2, batch=2, seed=3))


def test_more_than_was_built_for_is_refused() -> None:
    pair = Pair("attention", window=4)
    with pytest.raises(InputError):
        pair.engines[1].run(tokens(CHUNK + 1), pair.states[1], commit=True)
