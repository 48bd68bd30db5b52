"""Checks of the device graph that TensorRT's parser omits, and conversion to the form it reads.

Works on raw `edge.protobuf` fields, since the board needs the onnx package for nothing else:
TensorRT reads the graph itself, and the launch plan describes its tensors.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edge.errors import BundleError, EngineError
from edge.launch import ITEM_SIZE, Weight
from edge.ops import DEVICE_DOMAIN, PLUGIN_PREFIX
from edge.protobuf import BYTES, VARINT, fields, message, put
from edge.runtime.cuda.device import ALIGNMENT
from edge.runtime.tensorrt.bindings import TensorRT

# fields of ModelProto, GraphProto, NodeProto
_GRAPH, _OPSETS, _FUNCTIONS = 7, 8, 25
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _OP_TYPE, _DOMAIN = 1, 2, 4, 7
# path from ValueInfoProto to a shape: type, tensor_type, shape
_TENSOR_SHAPE = (2, 1, 2)
# fields of TensorProto; its data types under the names of launch plans
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL = 1, 2, 8, 13
_DTYPES = {1: "f32", 3: "i8", 6: "i32", 10: "f16"}

# A smaller weight takes less memory than TensorRT's bookkeeping for an input.
LARGE = 64 << 10


def form_for(
    trt: TensorRT, model: bytes, file: str, weights: Mapping[str, Weight] | None = None
) -> bytes:
    """Convert the device graph to the form that this TensorRT's parser reads.

    With plugins, large `weights` of the plan become inputs (`bound`). TensorRT for RTX gets a graph
    inlined to standard ops. `file` is the name in messages.

    Raises BundleError if the graph is invalid, EngineError if inlining needs the missing package
    onnx.
    """
    check(model, file)
    if trt.kind == "tensorrt":
        return of_plugins(model, weights or {})
    # imported by name: inlining needs onnx, which a Jetson does not have
    try:
        graph: Any = importlib.import_module("edge.plugins.tensorrt.graph")
        onnx: Any = importlib.import_module("onnx")
    except ModuleNotFoundError as missing:
        raise EngineError(
            f"{trt.title} has no plugins and needs the graph in standard ops, which needs the "
            f"package {missing.name}",
            remedy="pip install 'mamba-edge[export]'",
        ) from None
    try:
        inlined = graph.inlined(onnx.ModelProto.FromString(model))
        data: bytes = inlined.SerializeToString(deterministic=True)
    except Exception as problem:  # protobuf and onnx raise no common type
        reason = str(problem).strip() or type(problem).__name__
        raise BundleError(f"cannot be put into standard ops: {reason}", file=file) from problem
    return data


def check(model: bytes, file: str) -> None:
    """Reject models that would crash the parser.

    Raises BundleError if the file is not a model, has no opset or nodes, or has a node without op
    or output, or an input or output without a shape.
    """
    try:
        (graph,) = _field_values(model, _GRAPH)
        if not _field_values(model, _OPSETS):
            raise ValueError("it names no version of its ops")
        nodes = _field_values(graph, _NODE)
        if not nodes or not all(
            _field_values(n, _OP_TYPE) and _field_values(n, _NODE_OUTPUT) for n in nodes
        ):
            raise ValueError("it has no nodes, or one without op or output")
        for end in (*_field_values(graph, _INPUT), *_field_values(graph, _OUTPUT)):
            for number in _TENSOR_SHAPE:
                (end,) = _field_values(end, number)
    except ValueError as problem:
        raise BundleError(f"is not a graph that can be read: {problem}", file=file) from None


def _field_values(data: bytes, number: int) -> list[bytes]:
    return [message(value) for field, _, value in fields(data) if field == number]


def of_plugins(model: bytes, weights: Mapping[str, Weight]) -> bytes:
    """Rename device ops to the plugins' names, drop their functions, and turn large `weights` of
    the plan into inputs.

    TensorRT's parser looks up a node by its op's name only, first among ONNX's own ops; before
    TensorRT 10.7 it preferred functions to plugins.
    """
    kept = [field for field in fields(with_inputs(model, weights)) if field[0] != _FUNCTIONS]
    return _rewrite(kept, _GRAPH, lambda graph: _rewrite(fields(graph), _NODE, _with_plugin_name))


def with_inputs(model: bytes, weights: Mapping[str, Weight], least: int = LARGE) -> bytes:
    """Return the model with its `bound` constants turned into inputs."""
    names = bound(model, weights, least)

    def without_data(graph: bytes) -> bytes:
        out = []
        for number, wire, value in fields(graph):
            if number == _INITIALIZER and _text_field(tensor := message(value), _NAME) in names:
                number, value = _INPUT, _as_input(tensor)
            out.append(put(number, wire, value))
        return b"".join(out)

    return _rewrite(fields(model), _GRAPH, without_data)


def bound(model: bytes, weights: Mapping[str, Weight], least: int = LARGE) -> frozenset[str]:
    """Return the names of the constants that need not be in an engine: weights of the plan with at
    least `least` bytes, aligned to 256 bytes, that only plugins read.

    An engine that contained them would hold each three times while it is built.
    """
    (graph,) = _field_values(model, _GRAPH)
    read_elsewhere = {
        message(name).decode(errors="replace")
        for node in _field_values(graph, _NODE)
        if _field_values(node, _DOMAIN) != [DEVICE_DOMAIN.encode()]
        for name in _field_values(node, _NODE_INPUT)
    }
    return frozenset(
        name
        for tensor in _field_values(graph, _INITIALIZER)
        if (name := _text_field(tensor, _NAME)) in weights
        and name not in read_elsewhere
        and weights[name].offset % ALIGNMENT == 0
        and _nbytes(weights[name]) >= least
        and _is_weight(tensor, weights[name])
    )


def constant_bytes(model: bytes, weights: Mapping[str, Weight]) -> int:
    """Return the bytes of the plan's weights that an engine with plugins contains."""
    inputs = bound(model, weights)
    return sum(_nbytes(weight) for name, weight in weights.items() if name not in inputs)


def _nbytes(weight: Weight) -> int:
    return weight.elements * ITEM_SIZE[weight.dtype]


def _is_weight(tensor: bytes, weight: Weight) -> bool:
    """Return whether the constant is the plan's weight: same type, size and place in the file."""
    location = {
        _text_field(entry, 1): _text_field(entry, 2) for entry in _field_values(tensor, _EXTERNAL)
    }
    return (
        location.get("offset", "0") == str(weight.offset)
        and location.get("length") == str(_nbytes(weight))
        and _DTYPES.get(_int_field(tensor, _DATA_TYPE)) == weight.dtype
        and math.prod(_dims(tensor)) == weight.elements
    )


def _as_input(tensor: bytes) -> bytes:
    """Return the constant as a ValueInfoProto."""
    dims = b"".join(put(1, BYTES, put(1, VARINT, size)) for size in _dims(tensor))
    kind = put(1, VARINT, _int_field(tensor, _DATA_TYPE)) + put(2, BYTES, dims)
    return put(1, BYTES, _text_field(tensor, _NAME).encode()) + put(2, BYTES, put(1, BYTES, kind))


def _dims(tensor: bytes) -> list[int]:
    return [value for number, _, value in fields(tensor) if number == _DIMS
            and isinstance(value, int)]  # fmt: skip


def _int_field(data: bytes, number: int) -> int:
    return next((value for field, _, value in fields(data)
                 if field == number and isinstance(value, int)), 0)  # fmt: skip


def _text_field(data: bytes, number: int) -> str:
    return b"".join(_field_values(data, number)[:1]).decode(errors="replace")


def _with_plugin_name(node: bytes) -> bytes:
    if _field_values(node, _DOMAIN) != [DEVICE_DOMAIN.encode()]:
        return node
    return _rewrite(fields(node), _OP_TYPE, lambda op: PLUGIN_PREFIX.encode() + op)


def _rewrite(
    items: Iterable[tuple[int, int, int | bytes]], number: int, change: Callable[[bytes], bytes]
) -> bytes:
    """Serialize the fields, with `change` applied to those of this number."""
    return b"".join(
        put(field, wire, change(message(value)) if field == number else value)
        for field, wire, value in items
    )
