"""How `norm` is called.

A node with the attribute "rows" set norms the wanted rows alone: row l·B+b of its outputs is that
of rows[l]·B+b of its inputs, which the graph says with two Gathers before it.
"""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, Rows, next_power_of_2, warps_for


def lower(at: Lowering, node: Node) -> None:
    """One program a row.

    A row of 2560 channels is 512 threads of 8 values. One row keeps one SM busy: it moves 30 KB,
    and the wait for memory and the two barriers of the sum, about 3 µs, are what it takes.
    """
    x = at.view(node.inputs["x"])
    added = at.view(node.inputs["added"]) if "added" in node.inputs else None
    scales = at.count(node, "scale")
    picks = bool(node.attributes.get("rows"))
    rows: Rows = "LB" if picks else x.rows
    pointers = {
        **at.given(node, "x", "added", "weight", "bias", "scale"),
        "rows": at.input("rows", "i32", Size(of="L")) if picks else None,
    }
    y = at.new(node.outputs["y"], "i8" if scales else "f32", rows, x.width)
    # x + added is written where the node names it
    total = at.new(node.outputs["sum"], "f32", rows, x.width) if node.outputs.get("sum") else None
    block = next_power_of_2(x.width)
    at.launch(
        "norm.norm",
        {
            **pointers,
            "y": at.pointer(y),
            "total": at.pointer(total),
            "B": at.size("B") if picks else None,
        },
        {
            "WIDTH": x.width,
            "BLOCK": block,
            "X_STRIDE": x.stride,
            "ADDED_STRIDE": 0 if added is None else added.stride,
            "SCALES": scales,
            "CENTERED": "LayerNorm" in node.op,
            "EPS": float(node.attributes["eps"]),
        },
        (Size(of=rows),),
        warps=warps_for(block),
    )
