"""Lowering of the norms of groups and of parts."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2, warps_for

_VALUES = 1024  # per program


def lower(at: Lowering, node: Node) -> None:
    """Launch up to 1024 values per program: 8 heads of 128."""
    x, groups = at.view(node.inputs["x"]), int(node.attributes["groups"])
    if x.width % groups:
        raise ExportError(f"{x.width} channels do not divide into {groups} groups", field=node.name)
    width = x.width // groups
    block_w = next_power_of_2(width)
    block = min(max(1, _VALUES // block_w), next_power_of_2(groups))
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "group_norm.group_norm",
        {**at.given(node, "x", "weight"), "y": at.pointer(y)},
        {
            "GROUPS": groups,
            "WIDTH": width,
            "X_STRIDE": x.stride,
            "EPS": float(node.attributes["eps"]),
            "BLOCK_G": block,
            "BLOCK_W": block_w,
        },
        (Size(of=x.rows), Size(times=cdiv(groups, block))),
        warps=warps_for(block * block_w),
        stages=1,
    )


def lower_parts_rms_norm(at: Lowering, node: Node) -> None:
    """Launch one program per row and part."""
    x, first = at.view(node.inputs["x"]), int(node.attributes["first"])
    half, remainder = divmod(x.width - first, 2)
    if remainder or half < 1:
        raise ExportError(f"{x.width} values are not {first} and two halves", field=node.name)
    block = next_power_of_2(max(first, half))
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "group_norm.parts_norm",
        {**at.given(node, "x", "weight"), "y": at.pointer(y)},
        {
            "FIRST": first,
            "HALF": half,
            "X_STRIDE": x.stride,
            "EPS": float(node.attributes["eps"]),
            "BLOCK": block,
        },
        (Size(of=x.rows), Size(times=3)),
        warps=warps_for(block),
        stages=1,
    )
