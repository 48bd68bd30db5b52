"""The device graph, `graphs/tensorrt.onnx`: a model's plan as an ONNX graph that plugins run.

Nodes are ops of `edge.plugins.device`. Each contains the launches of its plugin, and the graph has
the ops' function bodies. TensorRT runs it with the plugin library, after
`edge.runtime.tensorrt.graphfile` renames the nodes. Other runtimes use the bodies, or `inlined`.

Inputs and outputs are the memory of the CUDA engine, named as in the plan:

    tokens i32 [T,B] · rows i32 [L] · run i32 [8] · replay i32 [P] · slots i32 [T]
    ancestors i32 [A,A] · taps{K} i32 [T,K] · state_taps{K} i32 [K-1]
    rope{i}.cos, rope{i}.sin f32 [T,dim/2]
    …conv_state, …ssm_state [2, …] · …conv_in, …scan_x, …scan_dt, …scan_B [S,B,·]
    …key_cache, …value_cache [B,KV,C,P]

    logits f32 [L,B,V] · picked i32 [L,B] · `{name}.out`: a state, log or cache after the run
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import (
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    inliner,
    numpy_helper,
)

from edge.launch import DType
from edge.ops import DEVICE_DOMAIN, DEVICE_VERSION
from edge.plugins.device.library import device_functions
from edge.plugins.device.statements import DEVICE_OPS
from edge.plugins.lowering.plan import LOGITS, PICKED, Lowered
from edge.plugins.onnx import model_of
from edge.plugins.tensorrt import OUT
from edge.plugins.tensorrt.nodes import DeviceNode, StandardNode, device_nodes
from edge.plugins.tensorrt.operands import Tensors

PLUGIN_VERSION = "1"
_TYPES: Mapping[DType, int] = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "i8": TensorProto.INT8,
    "u8": TensorProto.INT8,  # the only byte type in TensorRT; the bits are the same
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
}


def device_graph(model: bytes | ModelProto, lowered: Lowered) -> ModelProto:
    """Make the device graph of `model` from the walks over it; its weights.bin serves both graphs.

    The same graph gives the same bytes, serialized deterministically.

    Raises LoweringError when a plugin cannot take a value as its kernel does.
    """
    proto = ModelProto.FromString(model) if isinstance(model, bytes) else model
    return _Graph(proto, lowered).model()


def inlined(model: ModelProto) -> ModelProto:
    """Inline all functions, for runtimes without the plugins: only standard ops are left."""
    result = inliner.inline_local_functions(model)
    _rows_for_vectors(result)
    return result


def _rows_for_vectors(model: ModelProto) -> None:
    """Turn products of a vector of ones with matrices into products of a row.

    TensorRT's parser squeezes the first axis of a product whose left side is a vector. That is the
    wrong one if the right side has more than two axes (onnx-tensorrt 10.1, MatMul,
    `needSqueezeHead`).
    """
    nodes = list(model.graph.node)
    vectors = {node.output[0] for node in nodes if node.op_type == "ConstantOfShape"}
    axis = numpy_helper.from_array(np.array([0], np.int64), "first.axis")
    del model.graph.node[:]
    for node in nodes:
        if node.op_type == "MatMul" and node.input[0] in vectors:
            row = f"{node.output[0]}.row"
            model.graph.node.append(
                helper.make_node("Unsqueeze", [node.input[0], axis.name], [row])
            )
            node.input[0] = row
        model.graph.node.append(node)
    if any(axis.name in node.input for node in model.graph.node):
        model.graph.initializer.append(axis)


class _Graph:
    def __init__(self, model: ModelProto, lowered: Lowered) -> None:
        self._stored = {proto.name: proto for proto in model.graph.initializer}
        self._tensors = Tensors(lowered)
        self._nodes: list[NodeProto] = []
        self._functions: dict[str, None] = {}
        self._initializers: dict[str, TensorProto] = {}
        self._inputs: dict[str, None] = {}
        self._outputs: dict[str, None] = dict.fromkeys((LOGITS, PICKED))
        self._computed: set[str] = set()
        for node in device_nodes(lowered):
            if isinstance(node, DeviceNode):
                self._device(node)
            else:
                self._standard(node)

    def model(self) -> ModelProto:
        # inputs that change from run to run come first, then memory that is updated in place
        inputs = sorted(self._inputs, key=lambda name: f"{name}{OUT}" in self._outputs)
        graph = helper.make_graph(
            self._nodes,
            "device",
            self._values(inputs),
            self._values(self._outputs),
            list(self._initializers.values()),
        )
        functions = device_functions(self._functions)
        return model_of(graph, functions, {DEVICE_DOMAIN: DEVICE_VERSION})

    def _values(self, names: Iterable[str]) -> list[ValueInfoProto]:
        tensors = ((name, self._tensors[name]) for name in names)
        return [
            helper.make_tensor_value_info(name, _TYPES[tensor.dtype], tensor.dims)
            for name, tensor in tensors
        ]

    def _device(self, node: DeviceNode) -> None:
        operands = node.operands
        kinds = {
            a.name: float if a.kind == "float" else int for a in DEVICE_OPS[operands.op].attributes
        }
        attributes = {name: kinds[name](value) for name, value in operands.attributes.items()}
        # the first plugin of an engine carries the kernels of all plugins
        carries = {} if self._functions else {"carries": 1}
        self._functions[operands.op] = None
        # check both names: other values end in `.out` too, such as the sum after a layer
        self._outputs |= {f"{name}{OUT}": None for name in operands.inputs
                          if f"{name}{OUT}" in operands.outputs}  # fmt: skip
        self._add(
            operands.op,
            operands.inputs,
            operands.outputs,
            node.name,
            DEVICE_DOMAIN,
            **attributes,
            **carries,
            launches=node.launches.encode(),
            plugin_version=PLUGIN_VERSION,
            plugin_namespace=DEVICE_DOMAIN,
        )

    def _standard(self, node: StandardNode) -> None:
        inputs = [
            name if columns is None else self._sliced(name, *columns)
            for name, columns in zip(node.inputs, node.columns, strict=True)
        ]
        self._add(node.op, inputs, node.outputs, node.name, "", **node.attributes)

    def _sliced(self, name: str, start: int, width: int) -> str:
        """Slice columns of a tensor and return the name of the result."""
        part = f"{name}.{start}_{width}"
        if part not in self._computed:
            bounds = [self._integer(value) for value in (start, start + width, -1)]
            self._add("Slice", [name, *bounds], [part], f"{part}.Slice", "")
        return part

    def _integer(self, value: int) -> str:
        name = f"const.{value}"
        self._stored.setdefault(name, numpy_helper.from_array(np.array([value], np.int64), name))
        return name

    def _add(
        self,
        op: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        name: str,
        domain: str,
        **attributes: Any,
    ) -> None:
        inputs, outputs = list(inputs), list(outputs)
        for value in inputs:
            if value in self._stored:
                self._initializers.setdefault(value, _signed(self._stored[value]))
            elif value not in self._computed:
                self._inputs[value] = None
        self._computed |= set(outputs)
        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        self._nodes.append(node)


def _signed(proto: TensorProto) -> TensorProto:
    """Return an initializer with u8 reinterpreted as i8, the same bits."""
    if proto.data_type != TensorProto.UINT8:
        return proto
    if proto.data_location != TensorProto.EXTERNAL:
        return numpy_helper.from_array(numpy_helper.to_array(proto).view(np.int8), proto.name)
    signed = TensorProto()
    signed.CopyFrom(proto)
    signed.data_type = TensorProto.INT8
    return signed
