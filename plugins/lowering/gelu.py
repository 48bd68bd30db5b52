"""How `kernels.gelu` is called: Gelu and GeluTanh."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv

_BLOCK = 512


def lower_gelu(at: Lowering, node: Node) -> None:
    """Every row in pieces of 512 channels, 4 a thread."""
    x = at.view(node.inputs[0])
    y = at.new(node.outputs[0], "f32", x.rows, x.width)
    at.launch(
        "gelu.gelu",
        {"x": at.pointer(x), "y": at.pointer(y)},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "TANH": node.op == "GeluTanh", "BLOCK": _BLOCK},
        (Size(of=x.rows), Size(times=cdiv(x.width, _BLOCK))),
        warps=4,
        stages=1,
    )


LOWER: dict[str, Lower] = {"Gelu": lower_gelu, "GeluTanh": lower_gelu}
