"""The nodes of the device graph: the op, tensors and launches of every node of a plan.

Nodes are those of a step. If the plan fuses two nodes for few rows, the device graph has the pair,
which for many rows has the launches of both nodes.

Standard nodes that launch kernels in the plan (the Add of a bias, a Gather of columns, a Concat)
stay standard nodes, on whole tensors. Standard nodes that only make views are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge.errors import ExportError
from edge.plugins.lowering.context import Lowering, Node, View
from edge.plugins.lowering.plan import Lowered, LoweringError
from edge.plugins.tensorrt.calls import Runs, node_launches
from edge.plugins.tensorrt.launches import NodeLaunches
from edge.plugins.tensorrt.operands import Operands, Tensors, operands

# nodes that only make views of values
_VIEW_OPS = ("Split", "Transpose")
_STANDARD = ("Add", "Gather", "Concat")


@dataclass(frozen=True)
class DeviceNode:
    """A node that a plugin runs."""

    name: str
    operands: Operands
    launches: NodeLaunches


@dataclass(frozen=True)
class StandardNode:
    """A standard ONNX node. `columns` has (first, count) of the columns read per input, or None."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    columns: tuple[tuple[int, int] | None, ...]
    attributes: dict[str, int]


def device_nodes(lowered: Lowered) -> Iterator[DeviceNode | StandardNode]:
    """Yield the nodes in the order of a step. Raises LoweringError when one has no device op."""
    tensors = Tensors(lowered)
    for node, runs in node_runs(lowered):
        at = lowered.walks[0].at
        try:
            if node.op in _STANDARD:
                yield _standard(at, node)
            elif node.op not in _VIEW_OPS:
                device_operands = operands(at, node)
                name = f"{device_operands.outputs[0]}.{device_operands.op}"
                yield DeviceNode(
                    name, device_operands, node_launches(device_operands, runs, tensors)
                )
        except ExportError as problem:
            raise LoweringError(problem.message, field=node.name) from problem


def node_runs(lowered: Lowered) -> list[tuple[Node, list[Runs]]]:
    """Return every node of a step with its launches in each regime.

    Raises LoweringError when the nodes of a regime do not correspond to those of a step.
    """
    launches = [launch for _, launch in lowered.tables.launches.values()]
    variants = [variant for _, variant in lowered.tables.variants.values()]
    walks = [
        (walk.regime, {node.name: indices for node, indices in walk.nodes})
        for walk in lowered.walks
    ]
    result = []
    for node, _ in lowered.walks[0].nodes:
        runs = []
        for regime, nodes in walks:
            names = node.pair if regime.many and node.pair else (node.name,)
            if any(name not in nodes for name in names):
                raise LoweringError("is missing from some kinds of run", field=node.name)
            selected = [launches[index] for name in names for index in nodes.pop(name)]
            runs.append(Runs(regime, [(entry, variants[entry.variant]) for entry in selected]))
        result.append((node, runs))
    for _, nodes in walks:
        if nodes:
            raise LoweringError("is not part of a step", field=next(iter(nodes)))
    return result


def _standard(at: Lowering, node: Node) -> StandardNode:
    inputs, columns = [], []
    for name in node.inputs.values():
        view = at.views.get(name)
        inputs.append(name if view is None else view.buffer)
        columns.append(None if view is None else _column_range(view))
    attributes = {name: int(value) for name, value in node.attributes.items()}
    return StandardNode(
        node.name, node.op, tuple(inputs), tuple(node.outputs.values()), tuple(columns), attributes
    )


def _column_range(view: View) -> tuple[int, int] | None:
    """Return (first, count) of the columns of a view, or None if it is a whole tensor."""
    if view.offset == 0 and view.width == view.stride:
        return None
    return view.offset, view.width
