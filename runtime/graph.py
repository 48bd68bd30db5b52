"""Validation of ONNX graphs, before any library reads them.

ONNX Runtime and TensorRT execute whatever a graph says, and ONNX Runtime 1.23.2 reads weights from
any path and any memory address. So anything that the exporter does not write is refused: other
fields of the format, other ops, weights outside the bundle, recursive functions. Graphs are parsed
with `edge.protobuf`, because the runtime does not depend on onnx. Field numbers are those of
onnx.proto (github.com/onnx/onnx, onnx/onnx.proto).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, TypeAlias

from edge.errors import BundleError
from edge.ops import DEVICE_DOMAIN, DOMAIN
from edge.protobuf import VARINT, fields, message, varints

MAX_GRAPH = 16 << 20  # bytes of a file; a model of 64 layers takes half a million
MAX_NODES = 500_000  # with all function calls inlined; a model of 64 layers has 20,000
MAX_DEPTH = 8  # nesting of graphs in nodes
MAX_VALUES = 1 << 24  # elements of a constant that a node fills
REMEDY = "export the model again, from a checkpoint that you trust"

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
_TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
# TensorProto.DataType → field with its values one by one; int32_data if not listed
_TYPED_OF = {1: "float_data", 7: "int64_data", 11: "double_data", 12: "uint64_data",
             13: "uint64_data"}  # fmt: skip
# field of an attribute's value → its AttributeProto.AttributeType
_VALUES = {"f": 1, "i": 2, "s": 3, "t": 4, "g": 5, "floats": 6, "ints": 7, "strings": 8}
# TensorProto.DataType → bits
_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64,
         16: 16, 21: 4, 22: 4}  # fmt: skip
_EXTERNAL = 1
# op → index of the first input that determines the size of its output
_SIZES = {b"ConstantOfShape": 0, b"Expand": 1, b"Range": 0}
_NUMBER = re.compile(rb"[0-9]{1,18}")

# ops that functions and graphs may use; tests/test_graph_checks.py compares them to the exporter's
OPS = {
    "": frozenset(
        b"Abs Add And BitShift BitwiseAnd BitwiseXor Cast Clip Concat ConcatFromSequence "
        b"Constant ConstantOfShape Cos DequantizeLinear Div Equal Exp Expand Floor Gather "
        b"GatherElements Gelu Gemm Greater GreaterOrEqual Identity If IsNaN LayerNormalization "
        b"Less LessOrEqual Log Loop MatMul Max Min Mul Neg NonZero Not Or Pow QuantizeLinear "
        b"Range ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape Round Scan "
        b"ScatterElements ScatterND SequenceAt SequenceEmpty SequenceInsert Shape Sigmoid Sin "
        b"Size Slice Softmax Softplus Split Sqrt Squeeze Sub Sum Tanh TopK Transpose Unique "
        b"Unsqueeze Where".split()
    ),
    "com.microsoft": frozenset(
        b"GroupQueryAttention MatMulIntegerToFloat MatMulNBits RotaryEmbedding "
        b"SkipLayerNormalization SkipSimplifiedLayerNormalization".split()
    ),
}
_OWN_DOMAINS = (DOMAIN.encode(), DEVICE_DOMAIN.encode())


def check(
    model: bytes, weights: Mapping[str, int], file: str | PathLike[str], *, plugins: bool = False
) -> Message:
    """Parse a graph and refuse one that the exporter cannot have written.

    Args:
        model: bytes of the ONNX file.
        weights: file name → size, of files that may hold the graph's tensors.
        file: path for errors.
        plugins: whether ops of `edge.device` may lack a function.

    Raises BundleError naming the tensor, the op or the function at fault.
    """
    try:
        if len(model) > MAX_GRAPH:
            raise ValueError(f"it has {len(model)} bytes, at most {MAX_GRAPH} are allowed")
        parsed = _read("Model", model)
        _Checker(parsed, weights, plugins).all()
        return parsed
    except ValueError as problem:
        raise BundleError(
            f"is not a graph that can be run: {problem}", file=file, remedy=REMEDY
        ) from None


class _Checker:
    def __init__(self, model: Message, weights: Mapping[str, int], plugins: bool) -> None:
        if "graph" not in model or not model.get("opset_import"):
            raise ValueError("it has no graph, or names no version of its ops")
        self._graph, self._weights, self._plugins = model["graph"], weights, plugins
        self._functions: dict[tuple[bytes, bytes], Message] = {}
        for function in model.get("functions", ()):
            key = function.get("domain", b""), function.get("name", b"")
            if key[0] not in _OWN_DOMAINS or key in self._functions:
                raise ValueError(f"function {_quote(*key)} appears twice or is not this project's")
            self._functions[key] = function
        self._sizes: dict[tuple[bytes, bytes], int] = {}

    def all(self) -> None:
        self._size_functions()
        if self._graph_size(self._graph) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} nodes with its calls inlined")

    def _size_functions(self) -> None:
        """Compute the node count of every function with all calls inlined.

        Callees come first, on an explicit stack.
        """
        stack: list[tuple[bytes, bytes]] = []
        for key in self._functions:
            stack.append(key)
            while stack:
                key = stack[-1]
                calls = (op_of(node) for node, _ in _nodes(self._functions[key]))
                callee = next(
                    (c for c in calls if c in self._functions and c not in self._sizes), None
                )
                if callee is None:
                    stack.pop()
                    if key not in self._sizes:
                        self._sizes[key] = self._graph_size(self._functions[key])
                elif callee in stack:
                    raise ValueError(f"function {_quote(*callee)} calls itself")
                else:
                    stack.append(callee)

    def _graph_size(self, graph: Message) -> int:
        """Check the nodes of a graph or function and return their number with calls inlined."""
        size, counts = 0, _counts(graph)
        inputs = graph.get("input", ())  # a function's inputs are plain names
        _check_names(graph, [*map(name_of, inputs)] if graph is self._graph else inputs)
        for node, depth in _nodes(graph):
            domain, op = op_of(node)
            if (domain, op) in self._functions:
                size += self._sizes[domain, op]
            elif op not in OPS.get(domain.decode("latin-1"), ()) and not (
                self._plugins and domain == _OWN_DOMAINS[1]
            ):
                raise ValueError(f"op {_quote(domain, op)} is not one that the exporter writes")
            if not node.get("output") or depth > MAX_DEPTH:
                raise ValueError(
                    f"node {_quote(domain, op)} has no output, or is nested too deeply"
                )
            if (domain, op) == (b"", b"Loop") and (node.get("input") or [b""])[0] not in counts:
                raise ValueError("a Loop does not run once for each row of a tensor")
            size += 1
            _check_attributes(node)
            for attribute in node.get("attribute", ()):
                if "g" in attribute:
                    _check_names(attribute["g"], [*map(name_of, attribute["g"].get("input", ()))])
                if "t" in attribute:
                    self._check_tensor(attribute["t"])
                for tensor in attribute.get("g", {}).get("initializer", ()):
                    self._check_tensor(tensor)
        for tensor in graph.get("initializer", ()):
            self._check_tensor(tensor)
        self._check_fills(graph)
        return min(size, MAX_NODES + 1)

    def _check_tensor(self, tensor: Message) -> None:
        name = tensor.get("name", b"")
        dims, bits = integers(tensor.get("dims", ())), _BITS.get(tensor.get("data_type", 0))
        if bits is None or len(dims) > 16 or any(not 0 <= dim < 1 << 40 for dim in dims):
            raise ValueError(f"tensor {_quote(name)} has an unknown type or an invalid shape")
        if 0 in dims and max(dims) > MAX_VALUES:
            raise ValueError(f"tensor {_quote(name)} is empty but has an axis of {max(dims)}")
        size = -(-math.prod(dims) * bits // 8)
        if tensor.get("data_location", 0) == _EXTERNAL:
            self._check_external(tensor, name, size)
            return
        if tensor.get("data_location", 0) != 0 or tensor.get("external_data"):
            raise ValueError(f"tensor {_quote(name)} is stored both in the graph and outside it")
        raw = tensor.get("raw_data")
        expected = (
            "raw_data" if raw is not None else _TYPED_OF.get(tensor["data_type"], "int32_data")
        )
        if any(kind in tensor and kind != expected for kind in _TYPED):
            raise ValueError(f"tensor {_quote(name)} holds values not of its type")
        if raw is not None:
            complete = len(raw) == size
        else:  # values one by one, each at least one byte long
            chunks = (part for kind in _TYPED for part in tensor.get(kind, ()))
            bytes_held = sum(len(part) if isinstance(part, bytes) else 1 for part in chunks)
            complete = bytes_held * (2 if bits < 8 else 1) >= math.prod(dims)
        if not complete:
            raise ValueError(
                f"tensor {_quote(name)} does not hold as many values as its shape says"
            )

    def _check_external(self, tensor: Message, name: bytes, size: int) -> None:
        entries = [
            (entry.get("key", b""), entry.get("value", b""))
            for entry in tensor.get("external_data", ())
        ]
        external = dict(entries)
        if len(external) != len(entries) or set(external) != {b"location", b"offset", b"length"}:
            raise ValueError(f"tensor {_quote(name)} must have a location, an offset and a length")
        location = external[b"location"].decode("latin-1")
        if location not in self._weights:
            raise ValueError(
                f"tensor {_quote(name)} lies in {location!r:.80}, which is not a file of weights"
            )
        numbers = [_NUMBER.fullmatch(external[key]) for key in (b"offset", b"length")]
        if None in numbers:
            raise ValueError(
                f"tensor {_quote(name)} has an offset or a length that is not a number"
            )
        offset, length = (int(external[key]) for key in (b"offset", b"length"))
        if length != size or offset + length > self._weights[location]:
            raise ValueError(
                f"tensor {_quote(name)} takes {size} bytes, not {length} at {offset} of {location}"
                f", which has {self._weights[location]}"
            )

    def _check_fills(self, graph: Message) -> None:
        """Refuse nodes that fill a tensor of a constant shape with more than MAX_VALUES values."""
        constants = {tensor.get("name", b""): tensor for tensor in graph.get("initializer", ())}
        for node, _ in _nodes(graph):
            if op_of(node) == (b"", b"Constant"):
                for attribute in node.get("attribute", ()):
                    constants[node["output"][0]] = attribute.get(
                        "t", {"int64_data": attribute.get("ints", ())}
                    )
        for node, _ in _nodes(graph):
            first = _SIZES.get(op_of(node)[1])
            for name in () if first is None else node.get("input", ())[first:]:
                if name in constants:
                    values = tensor_values(constants[name])
                    if math.prod(values) > MAX_VALUES or max(values, default=0) > MAX_VALUES:
                        raise ValueError(
                            f"{_quote(*op_of(node))} fills more than {MAX_VALUES} values"
                        )


def _check_attributes(node: Message) -> None:
    """Raise ValueError for a repeated attribute or one with two values.

    Libraries disagree about these.
    """
    attributes = node.get("attribute", ())
    names = {attribute.get("name", b"") for attribute in attributes}
    for attribute in attributes:
        value_kinds = [_VALUES[kind] for kind in _VALUES if kind in attribute]
        if (
            len(value_kinds) > 1
            or (value_kinds and attribute.get("type") != value_kinds[0])
            or (value_kinds and "ref_attr_name" in attribute)
        ):
            raise ValueError(f"{_quote(*op_of(node))} has an attribute of two values or types")
    constant = op_of(node) == (b"", b"Constant")
    if len(names) < len(attributes) or (constant and len(attributes) != 1):
        raise ValueError(f"{_quote(*op_of(node))} has an attribute twice")


def _check_names(graph: Message, inputs: Iterable[bytes]) -> None:
    """Raise ValueError if two values of a graph or function have the same name."""
    names = [*inputs]
    names += [tensor.get("name", b"") for tensor in graph.get("initializer", ())]
    names += [name for node in graph.get("node", ()) for name in node.get("output", ()) if name]
    if len(set(names)) < len(names):
        duplicate, _ = Counter(names).most_common(1)[0]
        raise ValueError(f"two values are called {_quote(duplicate)}")


def _nodes(graph: Message) -> Iterator[tuple[Message, int]]:
    """Yield the nodes of a graph or function and of nested graphs, with their depth."""
    stack = [(graph, 1)]
    while stack:
        current, depth = stack.pop()
        for node in current.get("node", ()):
            yield node, depth
            stack += [(a["g"], depth + 1) for a in node.get("attribute", ()) if "g" in a]


def _counts(graph: Message) -> set[bytes]:
    """Return values that count rows of a tensor: results of Shape or Size, possibly squeezed."""
    counts: set[bytes] = set()
    for node, _ in _nodes(graph):
        op, first_input = op_of(node), (node.get("input") or [b""])[0]
        if op in ((b"", b"Shape"), (b"", b"Size")) or (
            op == (b"", b"Squeeze") and first_input in counts
        ):
            counts.update(node.get("output", ()))
    return counts


def op_of(node: Message) -> tuple[bytes, bytes]:
    """Return the domain and name of a node's op."""
    domain = node.get("domain", b"")
    return b"" if domain == b"ai.onnx" else domain, node.get("op_type", b"")


def name_of(value: bytes) -> bytes:
    """Return the name of a ValueInfoProto."""
    return next((message(name) for number, _, name in fields(value) if number == 1), b"")


def _quote(*names: bytes) -> str:
    return repr("::".join(name.decode("utf-8", "replace") for name in names if name))[:100]


def integers(values: Any) -> list[int]:
    """Return the values of a repeated int64 field, packed or not."""
    numbers: list[int] = []
    for value in values:
        numbers += varints(value) if isinstance(value, bytes) else [value]
    return [value - (1 << 64) if value >> 63 else value for value in numbers]


def tensor_values(tensor: Message) -> list[int]:
    """Return the values of a small integer tensor."""
    raw = tensor.get("raw_data")
    if raw is not None and len(raw) <= 1024:
        size = _BITS.get(tensor.get("data_type", 0), 64) // 8 or 1
        return [
            int.from_bytes(raw[i : i + size], "little", signed=True)
            for i in range(0, len(raw), size)
        ]
    return integers(tensor.get("int64_data", ()))[:128]


def _read(kind: str, data: bytes, depth: int = 0) -> Message:
    """Parse a message into a dict. Raises ValueError for a field that `_KINDS` does not allow."""
    if depth > 3 * MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    known, parsed = _FIELDS[kind], Message()
    for number, wire, value in fields(data):
        if number not in known:
            raise ValueError(f"a {kind} has the field {number}")
        name, repeats, form, child_kind = known[number]
        if form == "#":
            if wire != VARINT:
                raise ValueError(f"{name} of a {kind} is not an integer")
        elif form != "~" and not isinstance(value, bytes):
            raise ValueError(f"{name} of a {kind} is a number")
        item = _read(child_kind, message(value), depth + 1) if child_kind else value
        if repeats:
            parsed.setdefault(name, []).append(item)
        elif name in parsed:
            raise ValueError(f"a {kind} has {name} twice")
        else:
            parsed[name] = item
    return parsed
