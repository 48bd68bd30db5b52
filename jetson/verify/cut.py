"""One node of the device graph as a graph of its own, without the onnx package.

The whole graph is run by ONNX Runtime on the CPU, through the ops' function bodies, with every
value as an output. So a node's inputs are those of a real run, and its outputs are known before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge import protobuf
from edge.errors import BundleError
from edge.launch import LaunchPlan
from edge.onnx_runtime import onnxruntime
from edge.ops import DEVICE_DOMAIN
from edge.protobuf import message, put
from edge.runtime.cuda.inputs import DeviceRun, Sources
from edge.runtime.ledger import ReplayLedger, ReplayStep, log_slots
from edge.runtime.ort_session import session_options
from edge.runtime.tensorrt import tensors

Array = NDArray[Any]

# fields of ModelProto, GraphProto, NodeProto, AttributeProto, ValueInfoProto and below
_GRAPH = 7
_NODES, _INITIALIZERS, _INPUTS, _OUTPUTS = 1, 5, 11, 12
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INT, _ATTRIBUTE_TYPE, _IS_INT = 1, 3, 20, 2
_TENSOR_NAME, _NAME = 8, 1
_BYTES, _NUMBER = 2, protobuf.VARINT

# ONNX Runtime's names of types, and TensorProto.DataType of each
_NUMPY: Mapping[str, type[np.generic]] = {
    "tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8,
    "tensor(int32)": np.int32, "tensor(int64)": np.int64,
}  # fmt: skip
_ELEMENTS = {
    np.dtype(np.float32): 1, np.dtype(np.float16): 10, np.dtype(np.int8): 3,
    np.dtype(np.int32): 6, np.dtype(np.int64): 7,
}  # fmt: skip
FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Node:
    """A node of the device graph; `data` is its NodeProto."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    data: bytes


@dataclass(frozen=True)
class Graph:
    """A device graph taken apart.

    Attributes:
        model: all of it.
        nodes: those that plugins run, in order.
        initializers: TensorProto by name.
        inputs: names of the graph's.
    """

    model: bytes
    nodes: tuple[Node, ...]
    initializers: Mapping[str, bytes]
    inputs: frozenset[str]


def read(model: bytes, file: str = "graph") -> Graph:
    """Take a device graph apart. Raises BundleError for what is no ONNX model."""
    try:
        (graph,) = _all(model, _GRAPH)
    except ValueError as problem:
        raise BundleError(f"is not an ONNX model: {problem}", file=file) from None
    nodes = [_node(data) for data in _all(graph, _NODES) if _text(data, _DOMAIN) == DEVICE_DOMAIN]
    initializers = {_text(data, _TENSOR_NAME): data for data in _all(graph, _INITIALIZERS)}
    inputs = frozenset(_text(data, _NAME) for data in _all(graph, _INPUTS))
    return Graph(model, tuple(nodes), initializers, inputs)


def first_of_each_op(graph: Graph) -> dict[str, Node]:
    """The first node of every op, in the graph's order."""
    found: dict[str, Node] = {}
    for node in graph.nodes:
        found.setdefault(node.op, node)
    return found


def alone(graph: Graph, node: Node, values: Mapping[str, Array]) -> bytes:
    """A model of this node. `values` are what it reads and yields: shapes and types are theirs."""
    needed = [name for name in dict.fromkeys(node.inputs) if name in graph.initializers]
    read_ = [name for name in dict.fromkeys(node.inputs) if name not in graph.initializers]
    parts = [
        put(_NODES, _BYTES, _carrying(node.data)),
        put(2, _BYTES, b"one"),
        *(put(_INITIALIZERS, _BYTES, graph.initializers[name]) for name in needed),
        *(put(_INPUTS, _BYTES, _described(name, values[name])) for name in read_),
        *(put(_OUTPUTS, _BYTES, _described(name, values[name])) for name in node.outputs),
    ]
    return _with_graph(graph.model, b"".join(parts))


def _carrying(node: bytes) -> bytes:
    """The node as the one that has the engine's kernels."""
    kept = [
        put(*field)
        for field in protobuf.fields(node)
        if not (field[0] == _ATTRIBUTE and _text(message(field[2]), _ATTRIBUTE_NAME) == "carries")
    ]
    attribute = (
        put(_ATTRIBUTE_NAME, _BYTES, b"carries")
        + put(_ATTRIBUTE_INT, _NUMBER, 1)
        + put(_ATTRIBUTE_TYPE, _NUMBER, _IS_INT)
    )
    return b"".join(kept) + put(_ATTRIBUTE, _BYTES, attribute)


def _described(name: str, array: Array) -> bytes:
    """A ValueInfoProto."""
    dims = b"".join(put(1, _BYTES, put(1, _NUMBER, size)) for size in array.shape)
    tensor = put(1, _NUMBER, _ELEMENTS[array.dtype]) + put(2, _BYTES, dims)
    return put(1, _BYTES, name.encode()) + put(2, _BYTES, put(1, _BYTES, tensor))


def _with_graph(model: bytes, graph: bytes) -> bytes:
    kept = [put(*field) for field in protobuf.fields(model) if field[0] != _GRAPH]
    return b"".join(kept) + put(_GRAPH, _BYTES, graph)


def _node(data: bytes) -> Node:
    inputs, outputs = (
        tuple(part.decode() for part in _all(data, number))
        for number in (_NODE_INPUT, _NODE_OUTPUT)
    )
    return Node(_text(data, _NODE_NAME), _text(data, _OP_TYPE), inputs, outputs, data)


def _all(data: bytes, number: int) -> list[bytes]:
    return [message(value) for found, _, value in protobuf.fields(data) if found == number]


def _text(data: bytes, number: int) -> str:
    return next(iter(_all(data, number)), b"").decode()


# -- values of a real run -------------------------------------------------------------------------

WINDOW = 4
CAPACITY = 16
# a prompt, two tokens that could be taken back, and the three that are looked at
COUNTS = (5, 2, 3)


class Values:
    """Runs of the whole graph on the CPU, one after the other as a session's are."""

    def __init__(self, graph: Graph, plan: LaunchPlan, folder: Path, vocab_size: int) -> None:
        """`folder` has the graph's weights.bin."""
        self._graph = graph
        self._sources, self._lists = Sources(plan), tensors.lists(plan)
        self._vocab_size = vocab_size
        self._session = self._opened(folder)
        self._outputs = [output.name for output in self._session.get_outputs()]

    def _opened(self, folder: Path) -> Any:
        """With all that device nodes yield as outputs, and all that they read."""
        graph = self._graph
        own = [_text(data, 1) for data in _all(_all(graph.model, _GRAPH)[0], _OUTPUTS)]
        known = {*own, *graph.inputs, *graph.initializers}
        wanted = dict.fromkeys(
            name for n in graph.nodes for name in (*n.outputs, *n.inputs) if name
        )
        extra = b"".join(
            put(_OUTPUTS, _BYTES, put(1, _BYTES, name.encode()))
            for name in wanted
            if name not in known
        )
        options = session_options(1)
        options.add_session_config_entry(FOLDER, str(folder))
        whole = _with_graph(graph.model, _all(graph.model, _GRAPH)[0] + extra)
        return onnxruntime.InferenceSession(whole, options, providers=["CPUExecutionProvider"])

    def last(self) -> dict[str, Array]:
        """Everything of the last of the runs COUNTS, its graph inputs included."""
        ledger = ReplayLedger(WINDOW)
        states: dict[str, Array] = {}
        rng = np.random.default_rng(20261121)
        feeds: dict[str, Array] = {}
        found: dict[str, Array] = {}
        for index, count in enumerate(COUNTS):
            step = ledger.commit(count) if index == 0 else ledger.run(count)
            tokens = rng.integers(0, self._vocab_size, (count, 1))
            feeds = self._feeds(step, tokens, states)
            found = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
            states = {
                n.removesuffix(tensors.OUT): found[n]
                for n in found
                if n.removesuffix(tensors.OUT) in feeds
            }
            ledger = step.after
        return feeds | found

    def _feeds(
        self, step: ReplayStep, tokens: NDArray[np.int64], states: Mapping[str, Array]
    ) -> dict[str, Array]:
        slots = log_slots(WINDOW)
        sizes = {"T": len(tokens), "B": 1, "L": 1, "A": 1, "S": slots, "P": slots, "C": CAPACITY}
        feeds = {
            meta.name: np.zeros(
                [sizes[dim] if isinstance(dim, str) else dim for dim in meta.shape],
                _NUMPY[meta.type],
            )
            for meta in self._session.get_inputs()
        }
        flat = {name: feeds[name].reshape(-1) for name in feeds if name in self._lists}
        self._sources.fill(flat, DeviceRun(tokens, step, [len(tokens) - 1]))
        return feeds | dict(states)


# -- comparing ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Of one output.

    Attributes:
        worst: in steps of an integer, or of the largest value.
        share: of integers that differ.
    """

    output: str
    worst: float
    share: float
    right: bool


# order of floating-point sums; integers: one step, one value in 10,000, and one at least
_FLOAT, _SHARE = 1e-3, 1e-4


def compare(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> list[Difference]:
    """Each output that was found beside what was wanted."""
    return [_difference(name, array, wanted[name]) for name, array in found.items()]


def _difference(name: str, found: Array, wanted: Array) -> Difference:
    apart = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    if found.dtype.kind == "f":
        scale = float(np.abs(wanted.astype(np.float64)).max()) or 1.0
        worst = float(apart.max()) / scale
        return Difference(name, worst, 0.0, worst <= _FLOAT)  # a NaN is not
    worst, others = float(apart.max()), int(np.count_nonzero(apart))
    allowed = found.dtype == np.int8 and others <= max(1, _SHARE * apart.size) and worst <= 1
    return Difference(name, worst, others / apart.size, allowed or others == 0)


def inputs_of(graph: Graph, node: Node) -> Sequence[str]:
    """What the node reads at run time."""
    return [name for name in dict.fromkeys(node.inputs) if name not in graph.initializers]
