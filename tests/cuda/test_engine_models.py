"""Whole models, interpreted, against ONNX Runtime: logits and states in every kind of run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge.errors import StateError
from edge.runtime.cuda.state import DeviceState
from edge.runtime.state import State
from tests.cuda.models import Engines, engines, poison, tokens

WINDOW, CAPACITY = 2, 64

# (model of tests/test_graph_models.py, recipe, type of the scans' states)
CASES: dict[str, tuple[str, str, str | None]] = {
    "mamba1": ("mamba1", "fp32", None),
    "mamba2": ("mamba2", "fp32", None),
    "attention": ("attention", "fp32", None),
    "hybrid": ("all", "fp32", None),
    "parallel": ("parallel", "fp32", None),
    "normed": ("normed", "fp32", None),
    "short": ("short", "fp32", None),
    "head-gate": ("head gate", "fp32", None),
    "deltanet": ("deltanet", "fp32", None),
    "experts": ("routed", "fp32", None),
    "mamba2-fp16": ("mamba2 groups", "fp16", None),
    "mamba1-w8a8": ("mamba1", "w8a8", "int8"),
    "mamba2-w8a8": ("mamba2", "w8a8", "int8"),
    "hybrid-w8a8": ("all", "w8a8", None),
    "experts-w8a8": ("routed", "w8a8", None),
}
# one case for each kernel that runs trees, in each of its types; other cases differ only in other
# kernels
TREES = ["deltanet", "mamba1", "mamba1-w8a8", "mamba2-fp16", "mamba2-w8a8", "hybrid", "hybrid-w8a8"]


class Pair:
    """One state on each engine; every action is done on both, and the results are compared."""

    def __init__(self, made: Engines, window: int = WINDOW) -> None:
        self.made = made
        sizes = {"window": window, "capacity": CAPACITY}
        self.ort: State = made.ort.new_state(**sizes)
        self.cuda: DeviceState = made.cuda.new_state(**sizes)

    def run(self, ids: np.ndarray, **how: object) -> np.ndarray:
        poison(self.made.cuda, self.cuda)
        found = self.made.cuda.run(ids, self.cuda, **how)
        close(found, self.made.ort.run(ids, self.ort, **how), rounded=self.rounded)
        return found.copy()

    def each(self, verb: str, *arguments: object) -> None:
        for state in (self.ort, self.cuda):
            getattr(state, verb)(*arguments)

    @property
    def rounded(self) -> bool:
        return any(w.dtype in ("i8", "f16") for w in self.made.cuda.plan.weights.values())

    def same(self) -> None:
        assert self.ort.position == self.cuda.position
        same_arrays(self.cuda.arrays(), self.ort.arrays(), self.rounded)


def close(found: np.ndarray, expected: np.ndarray, *, rounded: bool) -> None:
    """Compare values. Those rounded to 8 or 16 bits on the way may round to the neighbouring step
    and move all later ones; `test_engine_track.py` is strict about each.
    """
    assert found.shape == expected.shape
    error, largest = found - expected, np.abs(expected).max()
    assert np.abs(error).max() <= (0.08 if rounded else 2e-5) * largest
    assert np.sqrt(np.mean(error**2)) <= (0.03 if rounded else 1e-5) * largest


def last_rows(found: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the KV cache rows that both have; with a window of 5 tokens one may keep only 4."""
    counts = found.shape[2], other.shape[2]
    kept = min(counts)
    assert kept >= min(4, max(counts))
    return found[:, :, counts[0] - kept :], other[:, :, counts[1] - kept :]


def same_arrays(found: dict, expected: dict, rounded: bool) -> None:  # type: ignore[type-arg]
    assert found.keys() == expected.keys()
    for name, array in found.items():
        other = expected[name]
        if name.endswith("_cache"):
            array, other = last_rows(array, other)
        assert array.dtype == other.dtype and array.shape == other.shape, name
        if array.dtype == np.int8:
            apart = np.abs(array.astype(int) - other)
            assert apart.max() <= 4 and (apart > 0).mean() <= 0.1, name
        elif array.size:
            close(array.astype(np.float64), other, rounded=rounded or array.dtype == np.float16)


@pytest.mark.parametrize("case", CASES)
def test_chunks_steps_and_going_back(case: str) -> None:
    # runs that take seconds; other cases and the trees have longer runs of these kernels
    short = case in ("mamba1", "mamba2") or case.startswith(
        ("hybrid", "parallel", "normed", "head-gate", "experts")
    )
    window = 1 if short else WINDOW
    pair = Pair(engines(*CASES[case]), window)
    pair.run(tokens(11 if short else 19, seed=1), commit=True)
    for step in range(window + 1):  # the last one applies the oldest for good
        pair.run(tokens(1, seed=2 + step))
    pair.same()
    pair.run(tokens(window, seed=9), rows="all")
    for back in range(window + 1):
        snapshot = pair.cuda.snapshot()
        assert pair.cuda.reach == window, "a copy takes nothing away"
        ort = pair.ort.snapshot()
        pair.each("rewind", back)
        pair.same()
        if back < window:
            pair.cuda.restore(snapshot)
            pair.ort.restore(ort)
            pair.run(tokens(window, seed=9), rows=[window - 1, 0][:window])
    pair.run(tokens(5, seed=10), commit=True, rows="all")
    pair.same()


@pytest.mark.parametrize("case", TREES)
def test_trees(case: str) -> None:
    pair = Pair(engines(*CASES[case]), window=3)
    pair.run(tokens(2, seed=1))
    for node, parents in ((2, [-1, -1, 1]), (1, [-1, 0, 0])):
        pair.run(tokens(len(parents), seed=50 + node), parents=parents, rows="all")
        pair.each("select", node)
        pair.same()
    pair.run(tokens(1, seed=40))
    pair.same()


@pytest.mark.parametrize("case", ["mamba1", "mamba2-w8a8", "hybrid-w8a8"])
def test_states_go_from_one_engine_to_the_other(case: str, tmp_path: Path) -> None:
    pair = Pair(engines(*CASES[case]))
    pair.run(tokens(7, seed=1), commit=True)
    pair.run(tokens(2, seed=2))
    pair.cuda.save(tmp_path / "cuda", {"from": "cuda"})
    pair.ort.save(tmp_path / "ort", {"from": "ort"})
    other = Pair(pair.made)
    assert other.cuda.load(tmp_path / "ort") == {"from": "ort"}
    assert other.ort.load(tmp_path / "cuda") == {"from": "cuda"}
    assert other.cuda.reach == 0
    other.same()
    other.run(tokens(1, seed=3))
    other.cuda.restore(pair.ort.snapshot(applied=True))
    other.ort.restore(pair.cuda.snapshot(applied=True))
    other.run(tokens(2, seed=4))
    other.same()
    with pytest.raises(StateError, match="another engine"):
        pair.made.cuda.run(tokens(1), pair.ort)
    with pytest.raises(StateError, match="another engine"):
        pair.made.ort.run(tokens(1), pair.cuda)


@pytest.mark.parametrize("case", ["attention", "mamba1-w8a8", "mamba2-w8a8"])
def test_several_sequences(case: str) -> None:
    """Each sequence as if it were alone; also trees with attention, which `ort` cannot run."""
    made = engines(*CASES[case])
    together = made.cuda.new_state(batch=3, window=3, capacity=CAPACITY)
    pairs = [Pair(made, window=3) for _ in range(3)]

    def run(count: int, seed: int, **how: object) -> None:
        ids = tokens(count, batch=3, seed=seed)
        poison(made.cuda, together)
        found = made.cuda.run(ids, together, rows="all", **how)
        for row, sequence, pair in zip(found, ids, pairs, strict=True):
            close(row[None], made.ort.run(sequence[None], pair.ort, rows="all", **how),
                  rounded=pair.rounded)  # fmt: skip

    run(9, 1, commit=True)
    run(1, 2)
    run(3, 3)
    together.rewind(1)
    for pair in pairs:
        pair.ort.rewind(1)
    run(3, 4, parents=[-1, 0, 0])
    for state in (together, *(pair.ort for pair in pairs)):
        state.select(2)
    run(1, 5)
    arrays = together.arrays()
    for index, pair in enumerate(pairs):
        alone = {name: array[index : index + 1] for name, array in arrays.items()}
        same_arrays(alone, pair.ort.arrays(), pair.rounded)
    spread = made.cuda.new_state(batch=6, window=1, capacity=CAPACITY + 1)
    together.spread(spread)  # some of its tokens are pending
    for name, array in spread.arrays().items():
        np.testing.assert_array_equal(array, np.repeat(arrays[name], 2, 0))
    forked = pairs[0].cuda
    forked.restore(pairs[0].ort.snapshot(applied=True))
    wide = forked.fork(2)
    found = made.cuda.run(tokens(1, batch=2, seed=6), wide)
    for row, sequence in zip(found, tokens(1, batch=2, seed=6), strict=True):
        close(row[None], made.ort.run(sequence[None], pairs[0].ort), rounded=pairs[0].rounded)
        pairs[0].ort.rewind(1)
