"""Which layer and which op of the model each node of an optimized graph came from.

ONNX Runtime inlines the functions a bundle's graph is made of; what is left of them is in the names
of the values between nodes: `layers.3.scan` is what a call gave, `_inlfunc_SelectiveScan_token_7_u`
lies inside one. Read from the protocol buffer (onnx.proto: ModelProto.graph is field 7,
GraphProto.node 1; of NodeProto inputs are 1, outputs 2, the operator 4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge.ops import OPS
from edge.protobuf import fields, message

ONCE, EMBEDDING, HEAD = "once", "embedding", "head"
_LAYER = re.compile(r"layers\.(\d+)\.")
_INLINED = "_inlfunc_"
_GRAPH, _NODE, _INPUT, _OUTPUT, _OPERATOR = 7, 1, 1, 2, 4
_LAST = 1 << 30  # comes after every layer


@dataclass(frozen=True)
class GraphNode:
    """One node: its operator and the names of what it reads and makes."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a node belongs.

    Attributes:
        part: the op of the model, or the ONNX operator where the graph has it as it is.
        layer: `layer N`, `embedding`, `head`, or `once`: made for all layers together.
    """

    operator: str
    part: str
    layer: str


def read_nodes(model: bytes) -> list[GraphNode]:
    """The nodes of a model file's main graph, in order. ValueError where it is no model."""
    graph = b"".join(message(value) for number, _, value in fields(model) if number == _GRAPH)
    return [_node(message(value)) for number, _, value in fields(graph) if number == _NODE]


def _node(data: bytes) -> GraphNode:
    inputs, outputs, operator = [], [], ""
    for number, _, value in fields(data):
        if number == _INPUT:
            inputs.append(message(value).decode())
        elif number == _OUTPUT:
            outputs.append(message(value).decode())
        elif number == _OPERATOR:
            operator = message(value).decode()
    return GraphNode(operator, tuple(inputs), tuple(outputs))


def places(nodes: Sequence[GraphNode]) -> list[Place]:
    """Where each node belongs; `nodes` come after what they read.

    A node whose results have a layer's name is of that layer. Inside a function values have names
    of their own: such a node is of the last layer that anything it reads is of.
    """
    made: dict[str, int] = {}
    found = []
    for node in nodes:
        rank = max(map(_rank, node.outputs), default=-1)
        if rank < 0:
            rank = max((max(_rank(name), made.get(name, -1)) for name in node.inputs), default=-1)
        made |= dict.fromkeys(node.outputs, rank)
        found.append(Place(node.operator, _part(node), _layer(rank)))
    return found


def _rank(name: str) -> int:
    """How far along the model a value is, by its name; -1 where that does not say."""
    if layer := _LAYER.match(name):
        return 1 + int(layer[1])
    if name.startswith(("norm_f", "lm_head", "logits")):
        return _LAST
    return 0 if name.startswith("embed") else -1


def _layer(rank: int) -> str:
    named = {-1: ONCE, 0: EMBEDDING, _LAST: HEAD}
    return named.get(rank, f"layer {rank - 1}")


def in_order(layer: str) -> int:
    """Sorts names of layers as a token passes through them."""
    ends = {ONCE: -2, EMBEDDING: -1, HEAD: _LAST}
    return ends[layer] if layer in ends else int(layer.removeprefix("layer "))


def _part(node: GraphNode) -> str:
    return _function(node.outputs) or _function(node.inputs) or node.operator


def _function(names: Iterable[str]) -> str | None:
    """The op whose function one of these values lies in; the longest name that fits."""
    for name in names:
        if name.startswith(_INLINED):
            inside = name.removeprefix(_INLINED)
            fits = [op for op in OPS if inside == op or inside.startswith(f"{op}_")]
            if fits:
                return max(fits, key=len)
    return None
