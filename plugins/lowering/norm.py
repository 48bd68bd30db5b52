"""How `kernels.norm` is called: RMSNorm, LayerNorm, of x or of x + added, rounded or not.

A node with the attribute "rows" set norms the wanted rows alone: row l·B+b of its outputs is that
of rows[l]·B+b of its inputs, which the graph says with two Gathers before it.
"""

from __future__ import annotations

from edge.launch import Argument, Size
from edge.plugins.lowering.context import (
    Lower,
    Lowering,
    Node,
    Rows,
    View,
    Warps,
    next_power_of_2,
)

_WARPS: tuple[Warps, ...] = (16, 8, 4, 2, 1)


def lower_norm(at: Lowering, node: Node) -> None:
    """One program a row.

    A row of 2560 channels is 512 threads of 8 values. One row keeps one SM busy: it moves 30 KB,
    and the wait for memory and the two barriers of the sum, about 3 µs, are what it takes.
    """
    inputs = list(node.inputs)
    x = at.view(inputs.pop(0))
    added = at.view(inputs.pop(0)) if node.op.startswith("Add") else None
    pointers: dict[str, tuple[Argument, str] | None] = {
        "x": at.pointer(x),
        "added": at.pointer(added),
        "weight": at.pointer(at.constant(inputs.pop(0))),
        "bias": None,
        "scale": None,
        "rows": None,
    }
    scales = 0
    if "LayerNorm" in node.op:
        pointers["bias"] = at.pointer(at.constant(inputs.pop(0)))
    if node.op.endswith("Quantize"):
        scale = at.constant(inputs.pop(0))
        scales, pointers["scale"] = scale.size, at.pointer(scale)
    rows: Rows = x.rows
    if node.attributes.get("rows"):
        rows, pointers["rows"] = "LB", at.input("rows", "i32", Size(of="L"))
    y = at.new(node.outputs[0], "i8" if scales else "f32", rows, x.width)
    pointers["y"] = at.pointer(y)
    pointers["total"] = _total(at, node, y)
    pointers["B"] = at.size("B") if pointers["rows"] else None
    block = next_power_of_2(x.width)
    at.launch(
        "norm.norm",
        pointers,
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


def _total(at: Lowering, node: Node, y: View) -> tuple[Argument, str] | None:
    """x + added is written where the node names it."""
    if not node.op.startswith("Add") or not any(node.outputs[1:]):
        return None
    return at.pointer(at.new(node.outputs[1], "f32", y.rows, y.width))


def warps_for(block: int) -> Warps:
    """Warps for `block` values of one row: 8 values a thread, two loads of 16 bytes."""
    return next((warps for warps in _WARPS if block >= 256 * warps), 1)


LOWER: dict[str, Lower] = dict.fromkeys(
    (
        "RMSNorm",
        "AddRMSNorm",
        "LayerNorm",
        "AddLayerNorm",
        "RMSNormQuantize",
        "AddRMSNormQuantize",
    ),
    lower_norm,
)
