"""Rewriting a graph to output its last hidden states instead of logits."""

from __future__ import annotations

from edge.errors import EngineError
from edge.protobuf import BYTES, VARINT, fields, message, put
from edge.runtime.engine import HIDDEN, HIDDEN_SCALE, ROUNDED_HIDDEN

_GRAPH = 7  # field of ModelProto; numbers here are from onnx.proto
_NODE, _INITIALIZER, _OUTPUT = 1, 5, 12  # fields of GraphProto
_NODE_INPUT, _NODE_OUTPUT, _OP_TYPE = 1, 2, 4  # fields of NodeProto
_NAME = 1  # field of ValueInfoProto
# a TensorProto: u8, its name, 128. The graph stores int8 values plus 128 (plugins/quantize)
_ZERO = "final.zero"
_ZERO_TENSOR = put(2, VARINT, 2) + put(8, BYTES, _ZERO.encode()) + put(9, BYTES, b"\x80")


def before_head(model: bytes) -> bytes:
    """Return the graph cut after its last norm, whose output, as floats, is named `logits`.

    Raises EngineError if the graph has no such value.
    """
    parts = [
        put(number, wire, _cut_graph(message(value)) if number == _GRAPH else value)
        for number, wire, value in fields(model)
    ]
    return b"".join(parts)


def _cut_graph(graph: bytes) -> bytes:
    parts = list(fields(graph))
    produced = {
        name for number, _, node in parts if number == _NODE for name in _names(node, _NODE_OUTPUT)
    }
    if HIDDEN.encode() in produced:
        op, inputs = "Identity", [HIDDEN]
    elif ROUNDED_HIDDEN.encode() in produced:
        op, inputs = "DequantizeLinear", [ROUNDED_HIDDEN, HIDDEN_SCALE, _ZERO]
    else:
        raise EngineError(
            "the graph does not name its last hidden states",
            remedy="export the model again with this version",
        )
    removed, data = {inputs[0].encode()}, put(_INITIALIZER, BYTES, _ZERO_TENSOR)
    for number, wire, value in parts:
        if number == _NODE and removed & set(_names(value, _NODE_INPUT)):
            removed.update(_names(value, _NODE_OUTPUT))
        elif number != _OUTPUT or not removed & set(_names(value, _NAME)):
            data += put(number, wire, value)
    node = [
        *(put(_NODE_INPUT, BYTES, name.encode()) for name in inputs),
        put(_NODE_OUTPUT, BYTES, b"logits"),
    ]
    data += put(_NODE, BYTES, b"".join(node) + put(_OP_TYPE, BYTES, op.encode()))
    return data + put(_OUTPUT, BYTES, put(_NAME, BYTES, b"logits"))


def _names(value: int | bytes, number: int) -> list[bytes]:
    return [message(name) for field, _, name in fields(message(value)) if field == number]
