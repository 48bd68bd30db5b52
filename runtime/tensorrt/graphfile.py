"""The device graph as a file: checked for what TensorRT's parser takes for granted, and brought
into the form that it reads.

By hand on `edge.protobuf`, since the board needs the onnx package for nothing else: TensorRT reads
the graph itself, and the launch plan says what its tensors are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from edge.errors import BundleError, EngineError
from edge.ops import DEVICE_DOMAIN, PLUGIN_PREFIX
from edge.protobuf import fields, message, put
from edge.runtime.tensorrt.bindings import TensorRT

# fields of ModelProto, GraphProto, NodeProto
_GRAPH, _OPSETS, _FUNCTIONS = 7, 8, 25
_NODE, _INPUT, _OUTPUT = 1, 11, 12
_NODE_OUTPUT, _OP_TYPE, _DOMAIN = 2, 4, 7
# of ValueInfoProto a type, of that a tensor's, of that a shape
_TENSOR_SHAPE = (2, 1, 2)


def form_for(trt: TensorRT, model: bytes, file: str) -> bytes:
    """The device graph as this TensorRT's parser has to see it; `file` is for messages.

    Raises BundleError: it is none; EngineError: it has to be inlined, and onnx is not installed.
    """
    check(model, file)
    if trt.kind == "tensorrt":
        return of_plugins(model)
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


def of_plugins(model: bytes) -> bytes:
    """The model with its device ops under the plugins' names, and without their functions.

    TensorRT's parser looks a node up by its op's name alone, first among ONNX's own ops; before
    TensorRT 10.7 it took functions before plugins.
    """
    kept = [field for field in fields(model) if field[0] != _FUNCTIONS]
    return _rewritten(kept, _GRAPH, lambda graph: _rewritten(fields(graph), _NODE, _named))


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
