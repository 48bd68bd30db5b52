"""Whole device graphs through their function bodies, beside the graphs for ONNX Runtime.

Chunks, steps that replay, and rewound drafts: logits, picked tokens and states.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edge.bundle import open_bundle
from edge.bundle.kernels import DEVICE_GRAPH_FILE, open_plan
from edge.export.graph import GRAPH_FILE
from edge.export.graph.run import GraphRunner, GraphState, open_session, session_options
from edge.runtime.model import resolve
from tests.cuda.test_engine_models import close, same_arrays
from tests.tensorrt.graph_runner import DeviceRunner
from tests.tensorrt.graphs import Case, Made, made
from tests.test_graph_models import V

WINDOW, CAPACITY = 3, 64
CASES: dict[str, Case] = {
    "mamba1": ("mamba1", "fp32", None),
    "mamba1-fp16": ("mamba1 odd", "fp16", None),
    "mamba1-w8a8": ("mamba1", "w8a8", "int8"),
    "mamba2": ("mamba2 groups", "fp32", None),
    "mamba2-w8a8": ("mamba2", "w8a8", None),
    "mamba2-dynamic": ("mamba2 with mlp", "w8a8-dynamic", None),
    "hybrid": ("all", "fp32", None),
    "hybrid-w4a16": ("all", "w4a16", None),
    "hybrid-w4a8": ("all", "w4a8", None),
    "parallel": ("parallel", "fp32", None),
}


class Both:
    """One state of each graph; every run is done on both, and the results are compared."""

    def __init__(self, found: Made, batch: int) -> None:
        self.rounded = any(w.dtype in ("i8", "f16", "u8") for w in found.plan.weights.values())
        self.device = DeviceRunner(found, window=WINDOW, batch=batch, capacity=CAPACITY)
        session = open_session(found.folder, options=session_options(1))
        self.ort = GraphRunner(session, found.config)
        self.states = [self.ort.initial(batch, CAPACITY, fill=np.nan)]

    def run(self, tokens: NDArray[np.int64], commit: bool = False) -> None:
        count = len(tokens)
        rows, kept = list(range(count)), [count - 1] if commit else list(range(count))
        before = self.states[-1]
        expected, after = self.ort.run(tokens.T, before, rows=rows, kept=kept)
        # the states that a rewind can reach, and no others
        self.states = [*([] if commit else self.states), *after][-WINDOW - 1 :]
        found = self.device.run(tokens, commit=commit, rows=rows)
        close(found.swapaxes(0, 1), expected, rounded=self.rounded)
        assert np.array_equal(self.device.picked, found.argmax(-1))

    def back(self, count: int) -> None:
        self.device.back(count)
        del self.states[len(self.states) - count :]

    def same(self) -> None:
        last: GraphState = self.states[-1]
        assert last.position == self.device.ledger.position
        expected = {
            name: array[:, :, : last.position] if name.endswith("_cache") else array
            for name, array in last.arrays.items()
        }
        same_arrays(self.device.state(), expected, self.rounded)


@pytest.mark.parametrize("case", CASES)
def test_chunks_steps_and_drafts(case: str) -> None:
    found = made(*CASES[case])
    batch = 1 if found.config.has_attention else 2
    rng = np.random.default_rng(5)
    both = Both(found, batch)

    def tokens(count: int) -> NDArray[np.int64]:
        return rng.integers(0, V, (count, batch))

    both.run(tokens(19), commit=True)
    both.same()
    for _ in range(WINDOW + 1):  # the last one applies the oldest for good
        both.run(tokens(1))
    both.run(tokens(WINDOW))  # drafts, of which one is kept
    both.back(WINDOW - 1)
    both.run(tokens(2))
    both.back(1)
    both.run(tokens(4), commit=True)
    both.same()


@pytest.mark.parametrize("name", ["demo", "demo-bytes"])
def test_a_demonstration_says_the_same(name: str) -> None:
    """The graph in the bundle, by KL divergence and top-1 agreement.

    With int8 activations the first logits are equal; then one value rounds the other way and moves
    all later ones.
    """
    with open_bundle(resolve(name)) as bundle:
        config, dtypes = bundle.manifest.model, bundle.manifest.state_dtypes
        device = onnx.load_from_string(bundle.read(DEVICE_GRAPH_FILE))
        graph = bundle.path / GRAPH_FILE
        found = Made(bundle.path, config, graph, open_plan(bundle), device, dtypes)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (40, 1))
    runner = DeviceRunner(found, window=WINDOW, capacity=CAPACITY)
    logits = runner.run(tokens, commit=True, rows=range(40))[:, 0]
    ort = GraphRunner(open_session(found.folder, options=session_options(1)), config)
    expected = ort.run(tokens.T, ort.initial(1, CAPACITY))[0][0]
    close(logits[:20], expected[:20], rounded=False)
    p, q = log_softmax(expected), log_softmax(logits)
    assert (np.exp(p) * (p - q)).sum(-1).mean() < 5e-3
    assert (p.argmax(-1) == q.argmax(-1)).mean() >= 0.95


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
