"""A single node of a device graph: inputs for it, and the references' outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto

from edge.ops import Value
from edge.plugins.device.statements import DEVICE_OPS, viewable
from edge.runtime.cuda.inputs import fill_taps
from edge.runtime.ledger import ReplayLedger, ReplayStep, Tree
from tests.device_ops import CAPACITY, LOG_ROWS, WINDOW, Array, Case
from tests.device_reference import Steps, expected
from tests.tensorrt.device_graph import DeviceGraph, aliases, attributes
from tests.tensorrt.running import NUMPY, Placed, put


class NodeCase(Case):
    """A `Case` with the constants, columns and widths of a graph's node.

    Attributes:
        graph, node: the graph and its node.
    """

    def __init__(self, graph: DeviceGraph, node: NodeProto) -> None:
        self.name, self.op = node.op_type, DEVICE_OPS[node.op_type]
        self.graph, self.node = graph, node
        self.rng = np.random.default_rng(sum(map(ord, node.name)))
        given, stated = attributes(node), {a.name for a in self.op.attributes}
        self.attributes = {name: given[name] for name in given if name in stated}
        self._inputs = dict(zip((v.name for v in self.op.inputs), node.input, strict=True))
        self.constants = {
            name: graph.constants[value].array()
            for name, value in self._inputs.items()
            if value in graph.constants
        }

    def shape(self, v: Value, **known: Any) -> list[Any]:
        """Return the shape in the graph, with the run's values for symbols."""
        actual = self.graph.at_most[self._inputs[v.name]].shape
        if v.name == "replay":
            return [known["P"]]
        dims = [d for dim in v.shape for d in (("T", "B") if dim == "..." else (dim,))]
        sizes: dict[str, Any] = {**known, "S": LOG_ROWS}
        sizes.pop("P", None)
        if v.name.endswith("cache"):
            sizes["C"] = CAPACITY
        found = [sizes.get(dim, size) for dim, size in zip(dims, actual, strict=True)]
        if v.name in viewable(self.op):
            found[-1] = int(self.attributes[f"{v.name}_width"])
        return found

    def dtype(self, v: Value) -> np.dtype[Any]:
        return np.dtype(NUMPY[self.graph.at_most[self._inputs[v.name]].dtype])

    def values(self, v: Value, **known: int) -> Array:
        """Return values; floats are representable in fp16, since fp16 products round to those."""
        found = super().values(v, **known)
        return found.astype(np.float16).astype(found.dtype) if found.dtype.kind == "f" else found

    def whole(self, name: str) -> int:
        return self.graph.at_most[self._inputs[name]].shape[-1]

    def given(self, steps: Steps, batch: int) -> dict[str, Array]:
        """Return all inputs; the rows that a convolution reads are the runtime's."""
        if "taps" in self._inputs:
            self.sizes = {"K": self.graph.at_most[self._inputs["taps"]].shape[1]}
        found = super().given(steps, batch)
        if "taps" in found:
            after = ReplayLedger(WINDOW)
            fill_taps(
                ReplayStep(
                    steps.pending, steps.advance, steps.source, steps.target, steps.store,
                    steps.past, steps.slots, steps.parents, after,
                ),
                self.sizes["K"], found["taps"], found["state_taps"],
            )  # fmt: skip
        return self._together(found)

    def _together(self, given: dict[str, Array]) -> dict[str, Array]:
        """Put inputs that are columns of one tensor into one array."""
        whole: dict[str, Array] = {}
        for name in viewable(self.op):
            array = whole.setdefault(self._inputs[name], given[name])
            start, width = (self.attributes[f"{name}_{part}"] for part in ("start", "width"))
            array[..., start : start + width] = given[name][..., start : start + width]
            given[name] = array
        return given

    def run_plugin(self, given: dict[str, Array]) -> dict[str, Array]:
        """Return outputs by name, and `{input} before` and `after` for what must not change."""
        once: dict[str, Placed] = {}
        for name, value in self._inputs.items():
            if value not in once:
                once[value] = self.graph.constants.get(value) or put(given[name])
        placed = {name: once[value] for name, value in self._inputs.items()}
        made = self.graph.running(self.node).run([placed[v.name] for v in self.op.inputs])
        found = {v.name: y.array() for v, y in zip(self.op.outputs, made, strict=False)}
        written = {list(self._inputs)[i] for i in aliases(self.node).values()}
        for name, array in given.items():
            if name not in written:
                np.testing.assert_array_equal(placed[name].array(), array, err_msg=name)
        return found

    def wanted(self, given: dict[str, Array], steps: Steps) -> dict[str, Array]:
        """Return the references' outputs, with each token of a tree as the end of a chain."""
        if steps.parents is None or "Attention" in self.name:
            return expected(self.name, given, self.attributes, steps)
        chain = replace(steps, parents=None)
        found = dict(expected(self.name, given, self.attributes, chain))
        flowing = {
            v.name for v in self.op.inputs if v.role == "value" and v.shape[0] in ("T", "...")
        }
        results = [v.name for v in self.op.outputs if v.role == "value"]
        if not any(self.op.states()):
            return found
        for token in range(len(steps.parents)):
            path = list(Tree(steps.parents, steps.slots).path(token))
            alone = {n: a[path] if n in flowing else a for n, a in given.items()}
            branch = replace(chain, slots=(-1,) * len(path))
            ended = expected(self.name, alone, self.attributes, branch)
            for name in results:
                found[name][token] = ended[name][-1]
        return found
