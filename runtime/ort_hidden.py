"""A graph without its head: the last hidden states are its output in place of logits."""

from __future__ import annotations

from edge.errors import EngineError
from edge.protobuf import BYTES, VARINT, fields, message, put
from edge.runtime.engine import HIDDEN, HIDDEN_SCALE, ROUNDED_HIDDEN

_GRAPH = 7  # of a ModelProto; of onnx.proto, as those below
_NODE, _TENSOR, _OUTPUT = 1, 5, 12  # of a GraphProto
_READS, _MAKES, _OP = 1, 2, 4  # of a NodeProto
_NAME = 1  # of a ValueInfoProto
# a TensorProto: u8, its name, 128. Rounded values travel with 128 added here (plugins/quantize)
_ZERO = "final.zero"
_ZERO_TENSOR = put(2, VARINT, 2) + put(8, BYTES, _ZERO.encode()) + put(9, BYTES, b"\x80")


def before_head(model: bytes) -> bytes:
    """The graph with the nodes behind its last norm left out, and that norm's output, as floats,
    under the name `logits`.

    Raises EngineError: the graph has no such value.
    """
    parts = [
        put(number, wire, _shorter(message(value)) if number == _GRAPH else value)
        for number, wire, value in fields(model)
    ]
    return b"".join(parts)


def _shorter(graph: bytes) -> bytes:
    parts = list(fields(graph))
    made = {name for number, _, node in parts if number == _NODE for name in _names(node, _MAKES)}
    if HIDDEN.encode() in made:
        end, read = "Identity", [HIDDEN]
    elif ROUNDED_HIDDEN.encode() in made:
        end, read = "DequantizeLinear", [ROUNDED_HIDDEN, HIDDEN_SCALE, _ZERO]
    else:
        raise EngineError(
            "the graph does not name its last hidden states",
            remedy="export the model again with this version",
        )
    left, found = {read[0].encode()}, put(_TENSOR, BYTES, _ZERO_TENSOR)
    for number, wire, value in parts:
        if number == _NODE and left & set(_names(value, _READS)):
            left.update(_names(value, _MAKES))
        elif number != _OUTPUT or not left & set(_names(value, _NAME)):
            found += put(number, wire, value)
    node = [*(put(_READS, BYTES, name.encode()) for name in read), put(_MAKES, BYTES, b"logits")]
    found += put(_NODE, BYTES, b"".join(node) + put(_OP, BYTES, end.encode()))
    return found + put(_OUTPUT, BYTES, put(_NAME, BYTES, b"logits"))


def _names(value: int | bytes, number: int) -> list[bytes]:
    return [message(each) for at, _, each in fields(message(value)) if at == number]
