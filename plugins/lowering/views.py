"""Nodes that only say where values are: no launch, no copy."""

from __future__ import annotations

from edge.errors import ExportError
from edge.plugins.lowering.context import Lower, Lowering, Node


def split(at: Lowering, node: Node) -> None:
    """Neighbouring channels of one value."""
    whole = at.view(node.inputs[0])
    widths = [int(width) for width in at.constant(node.inputs[1]).array()]
    if node.attributes.get("axis") != -1 or sum(widths) != whole.width:
        raise ExportError("does not split channels", field=node.name)
    start = 0
    for name, width in zip(node.outputs, widths, strict=True):
        at.views[name] = whole.columns(start, width)
        start += width


def transpose(at: Lowering, node: Node) -> None:
    """[T, B, …] ↔ [B, T, …]: kernels read row t·B+b either way."""
    if list(node.attributes.get("perm", ())) != [1, 0, 2]:
        raise ExportError("swaps other axes than time and batch", field=node.name)
    at.views[node.outputs[0]] = at.view(node.inputs[0])


LOWER: dict[str, Lower] = {"Split": split, "Transpose": transpose}
