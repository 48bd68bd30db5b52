"""Reading ONNX files into dictionaries, limited to the fields that the exporter writes.

Field numbers are those of onnx.proto (github.com/onnx/onnx, onnx/onnx.proto). Parsed, a message
takes a hundred times its bytes, so messages and fields are counted while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from edge.protobuf import VARINT, fields, message

MAX_NESTING = 24
# a model of 64 layers has 11,000 messages and 50,000 fields
MAX_MESSAGES, MAX_FIELDS = 500_000, 4_000_000

Message: TypeAlias = dict[str, Any]

# kind → field number → its name. `*` marks a repeated field, `:Kind` a message, `#` an integer, `~`
# numbers in any encoding; the others are bytes. Unlisted fields are refused: a library might give
# them a meaning that is not checked here.
_KINDS: Mapping[str, Mapping[int, str]] = {
    "Model": {
        1: "ir_version#", 2: "producer_name", 3: "producer_version", 4: "domain",
        5: "model_version#", 6: "doc_string", 7: "graph:Graph", 8: "*opset_import:Opset",
        14: "*metadata_props", 25: "*functions:Function",
    },
    "Opset": {1: "domain", 2: "version#"},
    "Graph": {
        1: "*node:Node", 2: "name", 5: "*initializer:Tensor", 10: "doc_string", 11: "*input",
        12: "*output", 13: "*value_info", 16: "*metadata_props",
    },
    "Function": {
        1: "name", 4: "*input", 5: "*output", 6: "*attribute_names", 7: "*node:Node",
        8: "doc_string", 9: "*opset_import:Opset", 10: "domain", 12: "*value_info",
        14: "*metadata_props",
    },
    "Node": {
        1: "*input", 2: "*output", 3: "name", 4: "op_type", 5: "*attribute:Attribute",
        6: "doc_string", 7: "domain", 9: "*metadata_props",
    },
    "Attribute": {
        1: "name", 2: "f~", 3: "i#", 4: "s", 5: "t:Tensor", 6: "g:Graph", 7: "*floats~",
        8: "*ints~", 9: "*strings", 13: "doc_string", 20: "type#", 21: "ref_attr_name",
    },
    "Tensor": {
        1: "*dims~", 2: "data_type#", 4: "*float_data~", 5: "*int32_data~", 7: "*int64_data~",
        8: "name", 9: "raw_data", 10: "*double_data~", 11: "*uint64_data~", 12: "doc_string",
        13: "*external_data:Entry", 14: "data_location#",
    },
    "Entry": {1: "key", 2: "value"},
}  # fmt: skip
# the same, parsed: name, whether it repeats, `#`, `~` or neither, and the kind of message
_FIELDS = {
    kind: {
        number: (
            text.partition(":")[0].strip("*#~"), text[0] == "*", text[-1], text.partition(":")[2],
        )
        for number, text in numbered.items()
    }
    for kind, numbered in _KINDS.items()
}  # fmt: skip


def read_model(data: bytes) -> Message:
    """Parse a ModelProto. Raises ValueError for a field not listed here, or too many of them."""
    return _Reader().read("Model", data, 0)


class _Reader:
    def __init__(self) -> None:
        self._messages, self._fields = MAX_MESSAGES, MAX_FIELDS

    def read(self, kind: str, data: bytes, depth: int) -> Message:
        if depth > MAX_NESTING:
            raise ValueError("it is nested too deeply")
        self._messages -= 1
        known, parsed = _FIELDS[kind], Message()
        for number, wire, value in fields(data):
            self._fields -= 1
            if self._messages < 0 or self._fields < 0:
                raise ValueError(f"it has more than {MAX_MESSAGES} messages or {MAX_FIELDS} fields")
            if number not in known:
                raise ValueError(f"a {kind} has the field {number}")
            name, repeats, form, child_kind = known[number]
            if form == "#":
                if wire != VARINT:
                    raise ValueError(f"{name} of a {kind} is not an integer")
            elif form != "~" and not isinstance(value, bytes):
                raise ValueError(f"{name} of a {kind} is a number")
            item = self.read(child_kind, message(value), depth + 1) if child_kind else value
            if repeats:
                parsed.setdefault(name, []).append(item)
            elif name in parsed:
                raise ValueError(f"a {kind} has {name} twice")
            else:
                parsed[name] = item
        return parsed
