"""Whole models by their plugins: every node of the device graph through `enqueue`.

Plugins launch what the plan launches, so that logits and all of a state's memory have the same bits
as in the CUDA engine, whatever is run; only what is behind the wanted rows may be launched for
other numbers of rows. What ONNX has ops of is done by its reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge.runtime.cuda.runs import choose_program
from edge.runtime.cuda.state import DeviceState
from edge.runtime.ort import OrtEngine
from tests.cuda.models import poison, tokens
from tests.cuda.test_engine_models import close
from tests.on_device import NOTES, ON_GPU
from tests.quantized_models import network
from tests.tensorrt.machine import machine
from tests.tensorrt.plugin_host import whole
from tests.tensorrt.plugin_models import CAPACITY, CHUNK, WINDOW, Model, memory_of, model, run

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
# without the plugins, which is how it is where minutes count, the core runs these alone on a CPU
FEW = ("mamba1-w8a8", "attention")


def _model(case: str, few: Sequence[str] = ()) -> Model:
    if case not in few and not ON_GPU and not NOTES:
        whole()
    return model(*CASES[case])


class Pair:
    """A state for the plan and one for the plugins; what is done to one is done to the other."""

    def __init__(self, made: Model, batch: int = 1) -> None:
        self.made = made
        self.plan, self.plugins = (
            made.engine.new_state(batch=batch, window=WINDOW, capacity=CAPACITY) for _ in range(2)
        )

    def run(self, ids: np.ndarray, rows: Sequence[int] | None = None, **how: Any) -> np.ndarray:
        """Logits [L, B, V] of the plugins; the rest is compared. None: of all rows."""
        for state in (self.plan, self.plugins):
            poison(self.made.engine, state)
        wanted = "all" if rows is None else list(rows)
        expected = self.made.engine.run(ids, self.plan, rows=wanted, **how).transpose(1, 0, 2)
        machine().wait()
        machine().launched.clear()
        values = run(self.made, self.plugins, ids, rows=rows, **how)
        logits = values["logits"].array()
        if rows is None:
            self._launched(ids, "tree" if "parents" in how else "chain")
            assert np.array_equal(logits, expected)
        else:
            close(logits, expected, rounded=True)
        assert np.array_equal(values["picked"].array(), logits.argmax(-1))
        assert memory_of(self.plugins) == memory_of(self.plan)
        return logits

    def each(self, verb: str, *arguments: Any) -> None:
        for state in (self.plan, self.plugins):
            getattr(state, verb)(*arguments)

    def _launched(self, ids: np.ndarray, kind: str) -> None:
        """The plan's launches, but for those of nodes that are ONNX's own."""
        if ON_GPU:
            return
        plan = self.made.plan
        index = choose_program(plan, kind, ids.size)
        assert index is not None
        variants = [plan.variants[plan.launches[i].variant] for i in plan.programs[index].order]
        planned = Counter(v.key for v in variants if not v.kernel.startswith("rows."))
        assert Counter(each.key for each in machine().launched) == planned


@pytest.mark.parametrize("case", CASES)
def test_any_way_of_running_has_the_bits_of_the_plan(case: str) -> None:
    pair = Pair(_model(case, FEW))
    pair.run(tokens(17, seed=1), commit=True)  # more rows than are few
    pair.run(tokens(1, seed=2))
    pair.run(tokens(3, seed=3))
    pair.each("rewind", 2)
    pair.run(tokens(3, seed=4), parents=[-1, 0, 0])  # of the two that are pending, one is applied
    pair.each("select", 2)
    pair.run(tokens(2, seed=5))
    assert pair.plugins.ledger == pair.plan.ledger


@pytest.mark.parametrize("case", CASES)
def test_several_sequences_have_the_bits_of_the_plan(case: str) -> None:
    pair = Pair(_model(case), batch=2)
    for count, how in ((9, {"commit": True}), (8, {"commit": True}), (1, {}), (3, {})):
        pair.run(tokens(count, batch=2, seed=count), **how)
    pair.each("rewind", 1)
    pair.run(tokens(4, batch=2, seed=9), parents=[-1, 0, -1, 2])
    pair.each("select", 3)
    pair.run(tokens(1, batch=2, seed=10))


@pytest.mark.parametrize("case", ["mamba1-w8a8", "hybrid-fp16"])
def test_a_prompt_may_want_its_last_rows_alone(case: str) -> None:
    """Behind them there is one row, for which the head launches what it launches in a step."""
    pair = Pair(_model(case))
    pair.run(tokens(18, seed=1), rows=[17], commit=True)
    pair.run(tokens(4, seed=2), rows=[3, 1])
    pair.run(tokens(1, seed=3))


@pytest.mark.parametrize("case", ["mamba1-w8a8", "mamba2-w8a8", "hybrid-fp16"])
def test_logits_are_those_of_onnx_runtime(case: str) -> None:
    made = _model(case)
    name, _, _ = CASES[case]
    engine = made.engine
    ort = OrtEngine(made.path, network(name).config, threads=1, chunk=CHUNK,
                    state_dtypes=made.state_dtypes)  # fmt: skip
    theirs = ort.new_state(window=WINDOW, capacity=CAPACITY)
    ours: DeviceState = engine.new_state(window=WINDOW, capacity=CAPACITY)
    for count, commit in ((18, True), (1, False), (3, False)):
        ids = tokens(count, seed=count)
        found = run(made, ours, ids, commit=commit)["logits"].array().transpose(1, 0, 2)
        close(found, ort.run(ids, theirs, rows="all", commit=commit), rounded=True)
