"""What an ONNX file says of its graph, read without the onnx package, which no Jetson has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from edge import protobuf
from edge.errors import BundleError

# fields of ModelProto, GraphProto, ValueInfoProto, TypeProto, its Tensor, Dimension, NodeProto
_GRAPH, _OPSETS, _FUNCTIONS = 7, 8, 25
_NODE, _INPUT, _OUTPUT = 1, 11, 12
_NAME, _TYPE = 1, 2
_TENSOR = 1
_ELEMENT, _SHAPE = 1, 2
_VALUE, _SYMBOL = 1, 2
_RESULT, _OP_TYPE, _DOMAIN = 2, 4, 7
# more is no size that an engine is built for
_LARGEST = 1 << 31

# TensorProto.DataType → the names of `edge.launch.DType`
DTYPES = {1: "f32", 10: "f16", 3: "i8", 2: "u8", 6: "i32", 7: "i64"}


class Port(NamedTuple):
    """An input or output of a graph: its type, and numbers or symbols."""

    dtype: str
    dims: tuple[int | str, ...]


class Graph(NamedTuple):
    """A graph's inputs and outputs by name, in order, and its nodes' ops as (domain, op)."""

    inputs: dict[str, Port]
    outputs: dict[str, Port]
    ops: frozenset[tuple[str, str]]


def read(model: bytes, file: str) -> Graph:
    """Raises BundleError naming `file`: no ONNX model, one without what parsers take for granted,
    or with types that no engine has.
    """
    try:
        (graph,) = _messages(model, _GRAPH)
        if not list(_messages(model, _OPSETS)):
            raise ValueError("it names no version of its ops")
        return Graph(_ports(graph, _INPUT), _ports(graph, _OUTPUT), frozenset(_ops(graph)))
    except (ValueError, KeyError, UnicodeDecodeError) as problem:
        raise BundleError(f"is no graph that can be read: {problem}", file=file) from None


def bare(model: bytes) -> bytes:
    """The model without its functions: what a parser needs that would take those before plugins."""
    kept = (field for field in protobuf.fields(model) if field[0] != _FUNCTIONS)
    return b"".join(protobuf.put(*field) for field in kept)


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    for found, _, value in protobuf.fields(data):
        if found == number:
            yield protobuf.message(value)


def _text(data: bytes, number: int) -> str:
    return next(_messages(data, number), b"").decode()


def _ports(graph: bytes, number: int) -> dict[str, Port]:
    return {_text(value, _NAME): _port(value) for value in _messages(graph, number)}


def _port(value: bytes) -> Port:
    (kind,) = _messages(value, _TYPE)
    (tensor,) = _messages(kind, _TENSOR)
    (element,) = (v for n, _, v in protobuf.fields(tensor) if n == _ELEMENT)
    (shape,) = _messages(tensor, _SHAPE)
    if not isinstance(element, int):
        raise ValueError("an element type is no number")
    return Port(DTYPES[element], tuple(_dim(dim) for dim in _messages(shape, 1)))


def _dim(data: bytes) -> int | str:
    for number, _, value in protobuf.fields(data):
        if number == _VALUE and isinstance(value, int):
            if not 0 < value < _LARGEST:
                raise ValueError(f"a dimension is {value}")
            return value
        if number == _SYMBOL:
            return protobuf.message(value).decode()
    raise ValueError("a dimension is neither a number nor a symbol")


def _ops(graph: bytes) -> Iterator[tuple[str, str]]:
    nodes = list(_messages(graph, _NODE))
    if not nodes:
        raise ValueError("it has no nodes")
    for node in nodes:
        op = _text(node, _OP_TYPE)
        if not op:
            raise ValueError("a node has no op")
        if not any(_messages(node, _RESULT)):
            raise ValueError(f"a node ({op}) has no output")
        yield _text(node, _DOMAIN), op
