"""Lowering to the kernel `expand`."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2


def lower(at: Lowering, node: Node) -> None:
    x = at.view(node.inputs["x"])
    width = at.count(node, "index")
    y = at.new(node.outputs["y"], "f32", x.rows, width)
    at.launch(
        "expand_logits.expand",
        {"x": at.pointer(x), **at.given(node, "index"), "y": at.pointer(y)},
        {
            "K": x.width,
            "WIDTH": width,
            "X_STRIDE": x.stride,
            "BLOCK_K": min(2048, next_power_of_2(x.width)),
            "BLOCK": 1024,
        },
        (Size(of=x.rows), Size(times=cdiv(width, 1024))),
        warps=4,
        stages=1,
    )
