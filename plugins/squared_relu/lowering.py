"""How `squared_relu` is called."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv

_BLOCK = 512


def lower(at: Lowering, node: Node) -> None:
    """Every row in pieces of 512 channels, 4 a thread."""
    x = at.view(node.inputs["x"])
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "squared_relu.squared_relu",
        {"x": at.pointer(x), "y": at.pointer(y)},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "BLOCK": _BLOCK},
        (Size(of=x.rows), Size(times=cdiv(x.width, _BLOCK))),
        warps=4,
        stages=1,
    )
