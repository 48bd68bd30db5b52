"""Each launch of whole models against the reference ops, starting from the same values."""

from __future__ import annotations

import numpy as np
import pytest

from edge.export.graph.run import GraphRunner, open_reference
from tests.cuda.models import engines, poison, tokens
from tests.cuda.track import apart, beside_references

CASES: dict[str, tuple[str, str, str | None]] = {
    "mamba2-groups-fp16": ("mamba2 groups", "fp16", None),
    "mamba1-w8a8": ("mamba1", "w8a8", "int8"),
    "mamba1-w8a8-fp16": ("mamba1", "w8a8", "fp16"),
    "mamba2-w8a8": ("mamba2", "w8a8", "int8"),
    "mamba2-groups-w8a8": ("mamba2 groups", "w8a8", "fp16"),
    "deltanet": ("deltanet", "fp32", None),
    "hybrid": ("all", "fp32", None),
    "hybrid-w8a8": ("all", "w8a8", None),
}
# rows M = T·B of one, few and many: the three kinds of chain that kernels exist for
RUNS = {"step": (1, 1, False), "few": (2, 2, False), "many": (6, 3, True)}
# state types change only the scan's launch, and "all" has every other layer of the rest
_ONCE = {"mamba1-w8a8-fp16": "many", "mamba2-w8a8": "few", "hybrid": "step", "deltanet": "few"}


@pytest.mark.parametrize(
    ("case", "run"),
    [(case, run) for case in CASES for run in RUNS if _ONCE.get(case, run) == run],
)
def test_every_launch_makes_what_its_op_says(case: str, run: str) -> None:
    count, batch, commit = RUNS[run]
    made = engines(*CASES[case])
    if made.ort.config.has_attention:
        # the reference attention takes several tokens of one sequence only
        count, batch = count * batch, 1
    graph = GraphRunner(open_reference(made.folder), made.ort.config)
    before = made.ort.new_state(batch=batch, window=4, capacity=40)
    made.ort.run(tokens(5, batch, seed=1), before, commit=True)
    state = made.cuda.new_state(batch=batch, window=4, capacity=40)
    state.restore(before.snapshot())
    made.cuda.run(tokens(2, batch, seed=2), state)  # which the run below replays
    poison(made.cuda, state)
    ids = tokens(count, batch, seed=3)
    values, after = beside_references(made.cuda, state, graph, ids, commit=commit)
    assert "logits" in values and len(values) > len(made.ort.config.layers)
    half = any(weight.dtype == "f16" for weight in made.cuda.plan.weights.values())
    for name, (found, expected) in values.items():
        same(name, found, expected, half)
    if commit:
        # the kernels have stored it; only the ledger does not reflect it yet
        state.ledger = state.ledger.commit(count).after
        for name, array in state.snapshot().recurrent.items():
            assert array.dtype == after[name].dtype
            same(name, array, after[name], half)


def same(name: str, found: np.ndarray, expected: np.ndarray, half: bool) -> None:
    """Check that rounded values differ by at most one step, nearly nowhere; x is rounded for fp16
    weights.
    """
    most, places = apart(found, expected)
    if found.dtype == np.int8:
        assert most <= 1 and places <= 1 + found.size // 10_000, (name, most, places)
    else:
        # an fp16 state may round the other way as well
        limit = 2e-3 if half or expected.dtype == np.float16 else 2e-5
        assert most <= limit, (name, most)
