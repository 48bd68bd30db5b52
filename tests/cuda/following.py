"""A whole text on an engine of launches, and the reference ops that follow its values.

Both read the text in the same runs, and each keeps a state of its own. The reference continues with
every value that the engine computes, so that one value rounded the other way counts once
(`track`). A state that a run stores, replays or moves wrongly shows in the next values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import torch

from edge.export.graph import GRAPH_FILE
from edge.export.graph.run import GraphRunner, GraphState
from edge.plugins.reference.graph import ReferenceGraph
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.state import DeviceState
from edge.runtime.layout import batch_axis
from tests.cuda.models import Engines
from tests.cuda.track import Values, apart, kernels_values
from tests.rounded_products import BITS, FLOATING, open_rounding, references, to_int8

# relative to a value's largest number: sums in another order, and x rounded to fp16 before them
SUMMED, ROUNDED = 2e-5, 2e-3
# of the int8 numbers of a value, those that may be a step apart
FLIPS = 1e-4


@dataclass
class Worst:
    """The largest difference so far.

    Attributes:
        over: its share of what is allowed; more than 1 is an error.
        what: the value, the difference, and the limit.
        values: how many values were compared.
        steps: of int8 numbers, how many were a step apart, and of how many.
    """

    over: float = 0.0
    what: str = "nothing"
    values: int = 0
    steps: tuple[int, int] = (0, 0)

    def add(self, name: str, found: np.ndarray, expected: np.ndarray, limit: float) -> None:
        if not found.size:
            return
        most, places = apart(found, expected)
        over, what = most / limit, f"{name}: {most:.1e} of its largest, {limit:.0e} allowed"
        if found.dtype == np.int8:
            self.steps = self.steps[0] + places, self.steps[1] + found.size
            over = max(most, places / (1 + found.size * FLIPS))
            what = f"{name}: {places} of {found.size} rounded otherwise, by {most:.0f}"
        self.values += 1
        if not over <= self.over:  # NaN is the worst
            self.over, self.what = over, what


@dataclass
class Following:
    """An engine's text so far, and the reference's.

    Attributes:
        logits: of the engine, a run each.
        worst: of all values and of the states.
    """

    made: Engines
    capacity: int
    window: int = 4
    logits: list[np.ndarray] = field(default_factory=list)
    worst: Worst = field(default_factory=Worst)

    def __post_init__(self) -> None:
        engine = self.made.cuda
        # only those for CPUs round x to int8
        ops = references(to_int8) if isinstance(engine, CpuEngine) else {}
        self.graph = GraphRunner(open_rounding(self.made.folder, ops), engine.config)
        self.theirs = self.graph.initial(1, self.capacity)
        self.ours = engine.new_state(window=self.window, capacity=self.capacity)
        self._rounding, self._loose = Rounding(self.made.folder), set[str]()

    def run(self, tokens: np.ndarray, *, commit: bool) -> None:
        """Run tokens [1, T] on both, and compare every value."""
        reference = self.graph.session
        assert isinstance(reference, ReferenceGraph)
        found = values_of(self.made.cuda, self.ours, tokens, commit)
        loose = self._rounding.values(found)
        self._loose |= loose
        self.logits.append(found["logits"].reshape(1, tokens.shape[1], -1))

        def hook(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
            if name not in found or found[name].size != tensor.numel():
                return None
            ours, expected = found[name].reshape(tensor.shape), tensor.numpy()
            self.worst.add(name, ours, expected, ROUNDED if name in loose else SUMMED)
            return torch.from_numpy(ours.astype(expected.dtype))

        reference.hook = hook
        try:
            _, (self.theirs,) = self.graph.run(tokens, self.theirs)
        finally:
            reference.hook = None

    def finish(self) -> None:
        """Compare the states."""
        for name, array in self.ours.arrays().items():
            expected = state_array(self.theirs, name)
            if name.endswith("_cache"):  # with a window, only its last rows are kept
                expected = expected[:, :, expected.shape[2] - array.shape[2] :]
            assert (array.shape, array.dtype) == (expected.shape, expected.dtype), name
            half = array.dtype == np.float16 or f"{name}s" in self._loose
            self.worst.add(name, array, expected, ROUNDED if half else SUMMED)


def values_of(engine: CudaEngine, state: DeviceState, tokens: np.ndarray, commit: bool) -> Values:
    """Run tokens as `CudaEngine.run` does, and return every value of the run."""
    count = tokens.shape[1]
    state.ledger = state.ledger.with_room(0 if commit else count)
    if state.layout.slots is not None:
        state.make_room(count)
    found = kernels_values(engine, state, tokens, commit)
    ledger = state.ledger
    state.ledger = (ledger.commit(count) if commit else ledger.run(count)).after
    return found


def state_array(state: GraphState, name: str) -> np.ndarray:
    """Return a tensor of the reference's state as `State.arrays` gives the engine's."""
    array = state.arrays[name]
    if name.endswith("_cache"):
        return array[:, :, : state.position]
    return np.moveaxis(array, batch_axis(name), 0)


class Rounding:
    """Finds the values that depend on x rounded to fp16, or on an fp16 cache."""

    def __init__(self, folder: Path) -> None:
        graph = onnx.load(folder / GRAPH_FILE, load_external_data=False).graph
        self._nodes = list(graph.node)
        self._half = {
            tensor.name
            for tensor in (*graph.initializer, *graph.input)
            if _type(tensor) == onnx.TensorProto.FLOAT16
        }

    def values(self, found: Collection[str]) -> set[str]:
        """Return them for a run that leaves the values `found`, which the reference continues with.

        Of a pair of nodes that is one launch, the value between is not left.
        """
        loose = set[str]()
        for node in self._nodes:
            op, inputs = node.op_type.partition("_")[0], set(node.input)
            rounds = op in BITS or (op in FLOATING and self._half & inputs)
            reads = any(name.endswith("_cache") for name in self._half & inputs)
            if rounds or reads or (loose - set(found)) & inputs:
                loose |= set(node.output)
        return loose


def _type(tensor: onnx.TensorProto | onnx.ValueInfoProto) -> int:
    if isinstance(tensor, onnx.TensorProto):
        return int(tensor.data_type)
    return int(tensor.type.tensor_type.elem_type)
