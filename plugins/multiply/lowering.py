"""How `multiply` is called."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv

_BLOCK = 512


def lower(at: Lowering, node: Node) -> None:
    """Every row in pieces of 512 channels, 4 a thread."""
    x, z = at.view(node.inputs["x"]), at.view(node.inputs["z"])
    if x.width != z.width:
        raise ExportError(f"multiplies {x.width} values by {z.width}", field=node.name)
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "multiply.multiply",
        {**at.given(node, "x", "z"), "y": at.pointer(y)},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "Z_STRIDE": z.stride, "BLOCK": _BLOCK},
        (Size(of=x.rows), Size(times=cdiv(x.width, _BLOCK))),
        warps=4,
        stages=1,
    )
