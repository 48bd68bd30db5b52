"""The device graph as a file: checked for what TensorRT's parser takes for granted, and brought
into the form that it reads.

By hand on `edge.protobuf`, since the board needs the onnx package for nothing else: TensorRT reads
the graph itself, and the launch plan says what its tensors are.
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
# of ValueInfoProto a type, of that a tensor's, of that a shape
_TENSOR_SHAPE = (2, 1, 2)
# of TensorProto; its types, as launch plans call them
_DIMS, _DATA_TYPE, _NAME, _EXTERNAL = 1, 2, 8, 13
_DTYPES = {1: "f32", 3: "i8", 6: "i32", 10: "f16"}

# A smaller weight is less than what TensorRT holds for an input.
LARGE = 64 << 10


def form_for(
    trt: TensorRT, model: bytes, file: str, weights: Mapping[str, Weight] | None = None
) -> bytes:
    """The device graph as this TensorRT's parser has to see it; `file` is for messages.

    Of plugins, the large ones of the plan's `weights` become inputs (`bound`).

    Raises BundleError: it is none; EngineError: it has to be inlined, and onnx is not installed.
    """
    check(model, file)
    if trt.kind == "tensorrt":
        return of_plugins(model, weights or {})
    # by name: inlining needs onnx, which no Jetson has
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
    except Exception as problem:  # of protobuf or of onnx, which has no type of its own for it
        said = str(problem).strip() or type(problem).__name__
        raise BundleError(f"cannot be put into standard ops: {said}", file=file) from problem
    return data


def check(model: bytes, file: str) -> None:
    """Refuse what a parser would crash on. Raises BundleError: not a model, or it lacks an opset,
    nodes with op and output, or tensors with a shape at its ends.
    """
    try:
        (graph,) = _parts(model, _GRAPH)
        if not _parts(model, _OPSETS):
            raise ValueError("it names no version of its ops")
        nodes = _parts(graph, _NODE)
        if not nodes or not all(_parts(n, _OP_TYPE) and _parts(n, _NODE_OUTPUT) for n in nodes):
            raise ValueError("it has no nodes, or one without op or output")
        for end in (*_parts(graph, _INPUT), *_parts(graph, _OUTPUT)):
            for number in _TENSOR_SHAPE:
                (end,) = _parts(end, number)
    except ValueError as problem:
        raise BundleError(f"is not a graph that can be read: {problem}", file=file) from None


def _parts(data: bytes, number: int) -> list[bytes]:
    return [message(value) for found, _, value in fields(data) if found == number]


def of_plugins(model: bytes, weights: Mapping[str, Weight]) -> bytes:
    """The model with its device ops under the plugins' names, without their functions, and with
    the large ones of the plan's `weights` as inputs.

    TensorRT's parser looks a node up by its op's name alone, first among ONNX's own ops; before
    TensorRT 10.7 it took functions before plugins.
    """
    kept = [field for field in fields(with_inputs(model, weights)) if field[0] != _FUNCTIONS]
    return _rewritten(kept, _GRAPH, lambda graph: _rewritten(fields(graph), _NODE, _named))


def with_inputs(model: bytes, weights: Mapping[str, Weight], least: int = LARGE) -> bytes:
    """The model with its `bound` constants as inputs instead."""
    names = bound(model, weights, least)

    def without_data(graph: bytes) -> bytes:
        out = []
        for number, wire, value in fields(graph):
            if number == _INITIALIZER and _text(tensor := message(value), _NAME) in names:
                number, value = _INPUT, _as_input(tensor)
            out.append(put(number, wire, value))
        return b"".join(out)

    return _rewritten(fields(model), _GRAPH, without_data)


def bound(model: bytes, weights: Mapping[str, Weight], least: int = LARGE) -> frozenset[str]:
    """Names of the graph's constants that need not be in an engine: weights of the plan of `least`
    bytes or more, on a multiple of 256 bytes, that only plugins read.

    An engine that has them would hold each of them three times while it is built.
    """
    (graph,) = _parts(model, _GRAPH)
    read_elsewhere = {
        message(name).decode(errors="replace")
        for node in _parts(graph, _NODE)
        if _parts(node, _DOMAIN) != [DEVICE_DOMAIN.encode()]
        for name in _parts(node, _NODE_INPUT)
    }
    return frozenset(
        name
        for tensor in _parts(graph, _INITIALIZER)
        if (name := _text(tensor, _NAME)) in weights
        and name not in read_elsewhere
        and weights[name].offset % ALIGNMENT == 0
        and _nbytes(weights[name]) >= least
        and _is(tensor, weights[name])
    )


def constant_bytes(model: bytes, weights: Mapping[str, Weight]) -> int:
    """Bytes of the plan's weights that are in an engine of plugins."""
    inputs = bound(model, weights)
    return sum(_nbytes(each) for name, each in weights.items() if name not in inputs)


def _nbytes(weight: Weight) -> int:
    return weight.elements * ITEM_SIZE[weight.dtype]


def _is(tensor: bytes, weight: Weight) -> bool:
    """Whether the constant is the plan's weight: of its type and size, at its place in the file."""
    place = {_text(entry, 1): _text(entry, 2) for entry in _parts(tensor, _EXTERNAL)}
    return (
        place.get("offset", "0") == str(weight.offset)
        and place.get("length") == str(_nbytes(weight))
        and _DTYPES.get(_number(tensor, _DATA_TYPE)) == weight.dtype
        and math.prod(_dims(tensor)) == weight.elements
    )


def _as_input(tensor: bytes) -> bytes:
    """The constant's ValueInfoProto."""
    dims = b"".join(put(1, BYTES, put(1, VARINT, size)) for size in _dims(tensor))
    kind = put(1, VARINT, _number(tensor, _DATA_TYPE)) + put(2, BYTES, dims)
    return put(1, BYTES, _text(tensor, _NAME).encode()) + put(2, BYTES, put(1, BYTES, kind))


def _dims(tensor: bytes) -> list[int]:
    return [value for number, _, value in fields(tensor) if number == _DIMS
            and isinstance(value, int)]  # fmt: skip


def _number(data: bytes, number: int) -> int:
    return next((value for found, _, value in fields(data)
                 if found == number and isinstance(value, int)), 0)  # fmt: skip


def _text(data: bytes, number: int) -> str:
    return b"".join(_parts(data, number)[:1]).decode(errors="replace")


def _named(node: bytes) -> bytes:
    if _parts(node, _DOMAIN) != [DEVICE_DOMAIN.encode()]:
        return node
    return _rewritten(fields(node), _OP_TYPE, lambda op: PLUGIN_PREFIX.encode() + op)


def _rewritten(
    every: Iterable[tuple[int, int, int | bytes]], number: int, change: Callable[[bytes], bytes]
) -> bytes:
    """The fields as bytes, those of this number changed."""
    return b"".join(
        put(found, wire, change(message(value)) if found == number else value)
        for found, wire, value in every
    )
