"""Validation of ONNX graphs, before any library reads them.

ONNX Runtime and TensorRT execute whatever a graph says, and ONNX Runtime 1.23.2 reads weights from
any path and any memory address. So anything that the exporter does not write is refused: other
fields of the format, other ops, weights outside the bundle, recursive functions. Graphs are parsed
in `graph_format`, because the runtime does not depend on onnx.
"""

from __future__ import annotations

import math
import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, TypeAlias

from edge.errors import BundleError
from edge.ops import DEVICE_DOMAIN, DOMAIN
from edge.protobuf import fields, message, varints
from edge.runtime.graph_format import Message, read_model

MAX_GRAPH = 16 << 20  # bytes of a file; a model of 64 layers takes half a million
MAX_NODES = 500_000  # with all function calls inlined; a model of 64 layers has 20,000
MAX_DEPTH = 8  # nesting of graphs in nodes
MAX_VALUES = 1 << 24  # elements of a constant that a node fills
MAX_NAMES = 256  # inputs, or outputs, of a node or function; the exporter writes 28
REMEDY = "export the model again, from a checkpoint that you trust"

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
_NESTING = ((b"", b"If"), (b"", b"Loop"), (b"", b"Scan"))
_BODIES = (b"then_branch", b"else_branch", b"body")
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
        parsed = read_model(model)
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
        for first in self._functions:
            if first in self._sizes:
                continue
            stack, on_stack = [(first, self._calls(first))], {first}
            while stack:
                key, calls = stack[-1]
                callee = next((call for call in calls if call not in self._sizes), None)
                if callee is None:
                    stack.pop()
                    on_stack.remove(key)
                    self._sizes[key] = self._graph_size(self._functions[key])
                elif callee in on_stack:
                    raise ValueError(f"function {_quote(*callee)} calls itself")
                else:
                    stack.append((callee, self._calls(callee)))
                    on_stack.add(callee)

    def _calls(self, key: tuple[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the functions that a function calls."""
        stack = [self._functions[key]]
        while stack:
            for node in stack.pop().get("node", ()):
                if (op := op_of(node)) in self._functions:
                    yield op
                stack += [a["g"] for a in node.get("attribute", ()) if "g" in a]

    def _graph_size(self, outermost: Message) -> int:
        """Check the nodes of a graph or function and return their number with calls inlined."""
        size, inputs = 0, outermost.get("input", ())  # a function's inputs are plain names
        if outermost is self._graph:
            inputs = [name_of(value) for value in inputs]
        elif max(len(inputs), len(outermost.get("output", ()))) > MAX_NAMES:
            raise ValueError(f"a function has more than {MAX_NAMES} inputs or outputs")
        for graph, names, depth in _scopes(outermost, inputs):
            for tensor in graph.get("initializer", ()):
                self._check_tensor(tensor)
            for node in graph.get("node", ()):
                op = op_of(node)
                if op in self._functions:
                    size += self._sizes[op]
                elif op[1] not in OPS.get(op[0].decode("latin-1"), ()) and not (
                    self._plugins and op[0] == _OWN_DOMAINS[1]
                ):
                    raise ValueError(f"op {_quote(*op)} is not one that the exporter writes")
                if not node.get("output") or depth > MAX_DEPTH:
                    raise ValueError(f"node {_quote(*op)} has no output, or is nested too deeply")
                size += 1
                _check_attributes(node)
                _check_inputs(node, names)
                for attribute in node.get("attribute", ()):
                    if "t" in attribute:
                        self._check_tensor(attribute["t"])
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


# what is known of a value by its name: a tensor, if it is a constant; _COUNT, if it counts the rows
# or elements of a tensor; None otherwise
Names: TypeAlias = ChainMap[bytes, Any]
_COUNT = object()


def _scopes(graph: Message, inputs: Iterable[bytes]) -> Iterator[tuple[Message, Names, int]]:
    """Yield a graph or function and the graphs nested in it, with the names in scope and the depth.

    Graphs beside each other may use one name for different values; each sees its own and those of
    the graphs around it.
    """
    stack: list[tuple[Message, Iterable[bytes], Names, int]] = [(graph, inputs, ChainMap(), 1)]
    while stack:
        current, inputs, outer, depth = stack.pop()
        _check_names(current, inputs := [*inputs])
        names = outer.new_child(dict.fromkeys(inputs))
        for tensor in current.get("initializer", ()):
            names[tensor.get("name", b"")] = tensor
        for node in current.get("node", ()):
            known = _known(node, names)
            names |= {name: known for name in node.get("output", ()) if name}
        yield current, names, depth
        for node in current.get("node", ()):
            for attribute in node.get("attribute", ()):
                if "g" in attribute:
                    nested = attribute["g"]
                    own = [name_of(value) for value in nested.get("input", ())]
                    stack.append((nested, own, names, depth + 1))


def _known(node: Message, names: Names) -> Any:
    """Return what is known of a node's output, as `Names` has it.

    Shape counts only if it gives all sizes: the number of rounds is one number, so it is then that
    of a tensor of one dimension, which has as many elements. One of many could be [2^60, 0].
    """
    op, attributes = op_of(node), node.get("attribute", ())
    if op == (b"", b"Size") or (op == (b"", b"Shape") and not attributes):
        return _COUNT
    if op == (b"", b"Squeeze"):
        return _COUNT if names.get(_first_input(node)) is _COUNT else None
    if op == (b"", b"Constant"):
        for attribute in attributes:
            numbers = attribute.get("ints", [attribute["i"]] if "i" in attribute else ())
            return attribute.get("t", {"int64_data": numbers})
    return None


def _first_input(node: Message) -> bytes:
    return (node.get("input") or [b""])[0]


def _check_inputs(node: Message, names: Names) -> None:
    """Refuse a Loop over anything but rows, and nodes that fill more than MAX_VALUES values."""
    op, inputs = op_of(node), node.get("input", ())
    if max(len(inputs), len(node["output"])) > MAX_NAMES:
        raise ValueError(f"{_quote(*op)} has more than {MAX_NAMES} inputs or outputs")
    if op == (b"", b"Loop") and names.get(_first_input(node)) is not _COUNT:
        raise ValueError("a Loop does not run once for each row of a tensor")
    first = _SIZES.get(op[1])
    for name in () if first is None else inputs[first:]:
        if isinstance(tensor := names.get(name), dict):
            values = tensor_values(tensor)
            if math.prod(values) > MAX_VALUES or max(values, default=0) > MAX_VALUES:
                raise ValueError(f"{_quote(*op)} fills more than {MAX_VALUES} values")


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
        # a graph handed to a function, or on by it, would find other values by the names it uses
        nests = op_of(node) in _NESTING and attribute.get("name") in _BODIES
        if ("g" in attribute) != nests:
            raise ValueError(f"{_quote(*op_of(node))} has a graph where none belongs, or none")
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
