"""Lowering to the kernel `norm`.

A node with the attribute "rows" norms only the wanted rows: row l·B+b of its outputs comes from row
rows[l]·B+b of its inputs. It replaces the graph's two Gathers before the norm.
"""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, Rows, next_power_of_2, warps_for


def lower(at: Lowering, node: Node) -> None:
    """Launch one program per row.

    A row of 2560 channels is 512 threads of 8 values. One row uses one SM and moves 30 KB; its time
    is about 3 µs, the wait for memory and the two barriers of the sum.
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
    # x + added is stored only if the node has the output
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
