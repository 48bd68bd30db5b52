"""A device graph run node by node: device ops by their plugins, others by ONNX's reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model
from onnx.reference import ReferenceEvaluator

from edge.launch import DType
from edge.ops import DEVICE_DOMAIN
from tests.tensorrt.plugin_host import Library, Tensor
from tests.tensorrt.running import DTYPES, NUMPY, Placed, Running, put

Sizes = Mapping[str, int]
OUT = ".out"
_DTYPES: Mapping[int, DType] = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.INT8: "i8",
    TensorProto.INT32: "i32",
    TensorProto.INT64: "i64",
}


@dataclass(frozen=True)
class Described:
    """A tensor's type and dimensions: numbers, and symbols that vary by run."""

    dtype: DType
    dims: tuple[int | str, ...]

    def of(self, sizes: Sizes) -> Tensor:
        return Tensor(self.dtype, tuple(sizes[d] if isinstance(d, str) else d for d in self.dims))


class DeviceGraph:
    """A device graph, run node by node. Constants are in device memory from the beginning.

    Attributes:
        nodes: nodes in order.
        inputs, outputs: descriptions of the graph's inputs and outputs.
        constants: constants in device memory.
        at_most: largest shape of every value, as the producing nodes report.
    """

    def __init__(self, model: ModelProto, folder: Path, library: Library, largest: Sizes) -> None:
        """`largest`: maximum of every symbol, for any run."""
        load_external_data_for_model(model, str(folder))
        graph = model.graph
        self.nodes = tuple(graph.node)
        self.inputs = {value.name: _described(value) for value in graph.input}
        self.outputs = {value.name: _described(value) for value in graph.output}
        self.constants = {t.name: put(numpy_helper.to_array(t)) for t in graph.initializer}
        self._opsets = {each.domain: each.version for each in model.opset_import}
        self._library = library
        self._running: dict[str, Running] = {}
        self.at_most = {name: each.of(largest) for name, each in self.inputs.items()}
        self.at_most |= {name: each.tensor for name, each in self.constants.items()}
        for node in self.nodes:
            self.at_most |= self._made_ready(node)

    def _made_ready(self, node: NodeProto) -> dict[str, Tensor]:
        """Return a node's largest outputs; its plugin is built, serialized and restored."""
        given = [self.at_most[name] for name in node.input]
        if node.domain == DEVICE_DOMAIN:
            running = Running(self._library, node.op_type, attributes(node), given, aliases(node))
            self._running[node.name] = running
            return dict(zip(node.output, running.outputs(given), strict=True))
        zeros = [np.zeros(each.shape, NUMPY[each.dtype]) for each in given]
        return {
            name: Tensor(DTYPES[array.dtype], array.shape)
            for name, array in self._reference(node, zeros).items()
        }

    def running(self, node: NodeProto) -> Running:
        return self._running[node.name]

    def run(
        self, inputs: Mapping[str, Placed], outputs: Mapping[str, Placed] | None = None
    ) -> dict[str, Placed]:
        """Return every value of a run, or those named in `outputs`. The issued work may not be
        finished.
        """
        values = {**self.constants, **inputs}
        for node in self.nodes:
            given = [values[name] for name in node.input]
            if node.domain == DEVICE_DOMAIN:
                wanted = [(outputs or {}).get(name) for name in node.output]
                made = self._running[node.name].run(given, wanted)
                values |= zip(node.output, made, strict=True)
            else:
                arrays = self._reference(node, [each.array() for each in given])
                values |= {name: put(np.ascontiguousarray(a)) for name, a in arrays.items()}
        return values

    def _reference(self, node: NodeProto, inputs: list[Any]) -> dict[str, Any]:
        evaluator = ReferenceEvaluator(node, opsets=self._opsets)
        feeds = {name: array for name, array in zip(node.input, inputs, strict=True) if name}
        return dict(zip(node.output, evaluator.run(None, feeds), strict=True))


def attributes(node: NodeProto) -> dict[str, Any]:
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


def aliases(node: NodeProto) -> dict[int, int]:
    """Return output → the input whose memory it shares: named like it with `.out`."""
    places = list(node.input)
    return {
        index: places.index(name.removesuffix(OUT))
        for index, name in enumerate(node.output)
        if name.endswith(OUT) and name.removesuffix(OUT) in places
    }


def _described(value: onnx.ValueInfoProto) -> Described:
    kind = value.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim)
    return Described(_DTYPES[kind.elem_type], dims)
