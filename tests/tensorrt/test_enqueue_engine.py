"""Whole models through their plugins: the tensorrt engine without TensorRT, which would call them.

Plugins launch what the plan launches, so logits and all of a state's memory have the same bits as
in the CUDA engine for every run. Only ops after the selection of rows may be launched for other
numbers of rows. ONNX ops are done by the reference. States, ledger, bindings and trees are the
engine's own; `test_engine_models.py` tests it where outputs are not in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import InputError
from edge.runtime.cuda.runs import choose_program
from edge.runtime.ort import OrtEngine
from tests.cuda.models import poison, tokens
from tests.cuda.test_engine_models import close
from tests.on_device import NOTES, ON_GPU
from tests.quantized_models import network
from tests.tensorrt.machine import machine
from tests.tensorrt.plugin_contexts import PluginContexts, tensorrt_engine
from tests.tensorrt.plugin_host import whole
from tests.tensorrt.plugin_models import CAPACITY, CHUNK, WINDOW, memory_of, model

# (model of tests/test_graph_models.py, recipe, type of the scans' states)
CASES: dict[str, tuple[str, str, str | None]] = {
    "mamba1-w8a8": ("mamba1", "w8a8", None),
    "mamba2-fp16": ("mamba2 groups", "fp16", None),
    "attention": ("attention", "fp16", None),
    "mamba1-fp16": ("mamba1 odd", "fp16", None),
    "mamba1-int8-state": ("mamba1", "w8a8", "int8"),
    "mamba2-w8a8": ("mamba2", "w8a8", "fp16"),
    "mamba2-w4": ("mamba2 with mlp", "w4", None),
    "mamba2-w4a8": ("mamba2 with mlp", "w4a8", None),
    "hybrid-fp16": ("all", "fp16", None),
    "hybrid-w8a8": ("all", "w8a8", None),
}
# without the plugins, in short test runs, the core runs only these on a CPU
FEW = ("mamba1-w8a8", "attention")


class Pair:
    """One state of each engine; every operation is done on both, and the results are compared."""

    def __init__(
        self, case: str, window: int = WINDOW, batch: int = 1, few: Sequence[str] = ()
    ) -> None:
        if case not in few and not ON_GPU and not NOTES:
            whole()
        self.made = made = model(*CASES[case])
        self.engines = (made.engine, tensorrt_engine(made))
        self.states = tuple(
            engine.new_state(batch=batch, window=window, capacity=CAPACITY)
            for engine in self.engines
        )
        contexts = self.engines[1].executor.contexts  # type: ignore[attr-defined]
        assert isinstance(contexts, PluginContexts)
        self.enqueued = contexts.enqueued

    def run(self, ids: np.ndarray, rows: Sequence[int] | None = None, **how: Any) -> np.ndarray:
        """Return the plugins' logits, after comparing everything. `rows` None: of all."""
        before, found = len(self.enqueued), []
        for engine, state in zip(self.engines, self.states, strict=True):
            poison(engine, state)
            machine().launched.clear()
            found.append(engine.run(ids, state, rows="all" if rows is None else rows, **how).copy())
        assert len(self.enqueued) == before + 1
        if rows is None:
            self._launched(ids, "tree" if "parents" in how else "chain")
            assert np.array_equal(*found)
        else:
            close(found[1], found[0], rounded=True)
        plan, plugins = self.states
        assert plugins.ledger == plan.ledger
        assert memory_of(plugins) == memory_of(plan)
        return found[1]

    def greedy(self, ids: np.ndarray) -> None:
        picked = [e.run_greedy(ids, s) for e, s in zip(self.engines, self.states, strict=True)]
        assert np.array_equal(*picked)

    def each(self, verb: str, *arguments: Any) -> None:
        for state in self.states:
            getattr(state, verb)(*arguments)

    def _launched(self, ids: np.ndarray, kind: str) -> None:
        """Return the plan's launches, except those of nodes that are ONNX's own."""
        if ON_GPU:
            return
        plan = self.made.plan
        index = choose_program(plan, kind, ids.size)
        assert index is not None
        variants = [plan.variants[plan.launches[i].variant] for i in plan.programs[index].order]
        planned = Counter(v.key for v in variants if not v.kernel.startswith("rows."))
        assert Counter(each.key for each in machine().launched) == planned


@pytest.mark.parametrize("case", CASES)
def test_any_way_of_running_has_the_bits_of_the_cuda_engine(case: str) -> None:
    pair = Pair(case, few=FEW)
    pair.run(tokens(17, seed=1), commit=True)  # more rows than `few` takes
    pair.run(tokens(1, seed=2))
    pair.run(tokens(3, seed=3))
    pair.each("rewind", 2)
    pair.run(tokens(3, seed=4), parents=[-1, 0, 0])  # of the two pending tokens one is applied
    pair.each("select", 2)
    pair.run(tokens(2, seed=5))
    pair.greedy(tokens(1, seed=6))


@pytest.mark.parametrize("case", CASES)
def test_several_sequences_have_the_bits_of_the_cuda_engine(case: str) -> None:
    pair = Pair(case, batch=2)
    for count, how in ((9, {"commit": True}), (8, {"commit": True}), (1, {}), (3, {})):
        pair.run(tokens(count, batch=2, seed=count), **how)
    pair.each("rewind", 1)
    pair.run(tokens(4, batch=2, seed=9), parents=[-1, 0, -1, 2])
    pair.each("select", 3)
    pair.run(tokens(1, batch=2, seed=10))


@pytest.mark.parametrize("case", ["mamba1-w8a8", "mamba2-fp16", "attention"])
def test_snapshots_and_files_are_those_of_the_cuda_engine(case: str, tmp_path: Path) -> None:
    """Each engine takes the other's snapshot and loads the other's file."""
    pair = Pair(case, window=3)
    pair.run(tokens(CHUNK, seed=1), commit=True)
    pair.run(tokens(3, seed=3))
    first, second = (state.snapshot() for state in pair.states)
    pair.states[0].restore(second)
    pair.states[1].restore(first)
    pair.run(tokens(2, seed=5))
    for number, state in enumerate(pair.states):
        state.save(tmp_path / str(number), {})
    for number, state in enumerate(pair.states):
        state.load(tmp_path / str(1 - number))
    pair.run(tokens(1, seed=6))
    pair.each("clear")
    pair.run(tokens(5, seed=8), commit=True)


@pytest.mark.parametrize("case", ["mamba1-w8a8", "hybrid-fp16"])
def test_a_prompt_may_want_its_last_rows_alone(case: str) -> None:
    """One row remains, for which the head makes the launches of a step."""
    pair = Pair(case)
    pair.run(tokens(18, seed=1), rows=[17], commit=True)
    pair.run(tokens(4, seed=2), rows=[3, 1])
    pair.run(tokens(1, seed=3))


@pytest.mark.parametrize("case", ["mamba1-w8a8", "mamba2-w8a8", "hybrid-fp16"])
def test_logits_are_those_of_onnx_runtime(case: str) -> None:
    pair = Pair(case)
    made, (name, _, _) = pair.made, CASES[case]
    ort = OrtEngine(made.path, network(name).config, threads=1, chunk=CHUNK,
                    state_dtypes=made.state_dtypes)  # fmt: skip
    theirs = ort.new_state(window=WINDOW, capacity=CAPACITY)
    for count, commit in ((18, True), (1, False), (3, False)):
        ids = tokens(count, seed=count)
        found = pair.run(ids, commit=commit)
        close(found, ort.run(ids, theirs, rows="all", commit=commit), rounded=True)


def test_more_than_was_built_for_is_refused() -> None:
    pair = Pair("attention")
    with pytest.raises(InputError):
        pair.engines[1].run(tokens(CHUNK + 1), pair.states[1], commit=True)
