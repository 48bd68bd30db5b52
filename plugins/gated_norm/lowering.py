"""Lowering to the kernels of `gated_norm`."""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.hadamard.lowering import lower as lower_rotation
from edge.plugins.hadamard.lowering import parts_of
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2, warps_for
from edge.plugins.lowering.fuse import Pair

PAIRS = (
    Pair(
        "GatedRMSNormInt8HadamardQuantize",
        "GatedRMSNormInt8",
        "HadamardQuantize",
        through=("x",),
        few=True,
    ),
)
_VALUES = 1024  # per program of `head_gate`
_TILE = 16  # the minimum for `tl.dot`: the most programs for a row, and the least padding


def lower(at: Lowering, node: Node) -> None:
    """Launch one program per row and group: 5120 channels are 512 threads of 8 or 16 values.

    Waiting for memory and the barriers of the sum determine the time for one row, as in `norm`.
    """
    x, z = at.view(node.inputs["x"]), at.view(node.inputs["z"])
    groups = node.attributes["groups"]
    if x.width % groups:
        raise ExportError(f"{x.width} channels do not divide into {groups} groups", field=node.name)
    width = x.width // groups
    block = next_power_of_2(width)
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "gated_norm.gated_norm",
        {**at.given(node, "x", "z", "z_scale", "weight"), "y": at.pointer(y)},
        {
            "GROUPS": groups,
            "WIDTH": width,
            "BLOCK": block,
            "X_STRIDE": x.stride,
            "Z_STRIDE": z.stride,
            "Z_SCALES": at.count(node, "z_scale"),
            "EPS": float(node.attributes["eps"]),
        },
        (Size(of=x.rows), Size(times=groups)),
        warps=warps_for(block),
        stages=1,
    )


def lower_silu_gate(at: Lowering, node: Node) -> None:
    at.elementwise("gated_norm.silu_gate", node, ("x", "z"))


def lower_sigmoid_gate(at: Lowering, node: Node) -> None:
    at.elementwise("gated_norm.sigmoid_gate", node, ("x", "z"))


def lower_head_gate(at: Lowering, node: Node) -> None:
    """Launch up to 1024 values per program, as in `group_norm`."""
    x, z = at.view(node.inputs["x"]), at.view(node.inputs["z"])
    heads = int(node.attributes["heads"])
    if z.width != heads or x.width % heads:
        raise ExportError(f"{z.width} gates for {x.width} values of {heads} heads", field=node.name)
    width = x.width // heads
    block_w = next_power_of_2(width)
    block = min(max(1, _VALUES // block_w), next_power_of_2(heads))
    y = at.new(node.outputs["y"], "f32", x.rows, x.width)
    at.launch(
        "gated_norm.head_gate",
        {**at.given(node, "x", "z"), "y": at.pointer(y)},
        {
            "HEADS": heads,
            "WIDTH": width,
            "X_STRIDE": x.stride,
            "Z_STRIDE": z.stride,
            "BLOCK_H": block,
            "BLOCK_W": block_w,
        },
        (Size(of=x.rows), Size(times=cdiv(heads, block))),
        warps=warps_for(block * block_w),
        stages=1,
    )


def lower_gated_rms_norm_int8_hadamard_quantize(at: Lowering, node: Node) -> None:
    """Fuse the norm into the rotation: every program gates the whole row, which it reads anyway.

    That is 5120 channels, 40 a thread, in each of the 5 programs of a row of Mamba-2 2.7B (80 x 64,
    16 of 80 rows each), which costs less than a separate launch. With several groups, and so
    several mean squares per row, the norm is a launch before the rotation.
    """
    x, z = at.view(node.inputs["x"]), at.view(node.inputs["z"])
    p, q = parts_of(at, node, x.width)
    if node.attributes["groups"] > 1:
        normed = f"{node.outputs['y']}.normed"
        lower(at, replace(node, op="GatedRMSNormInt8", outputs={"y": normed}))
        rotated = {**node.inputs, "x": normed}
        lower_rotation(at, replace(node, op="HadamardQuantize", inputs=rotated))
        return
    y = at.new(node.outputs["y"], "i8", x.rows, x.width)
    at.launch(
        "gated_norm.gated_norm_hadamard",
        {
            **at.given(node, "x", "z", "z_scale", "weight", "slow", "fast", "scale"),
            "y": at.pointer(y),
        },
        {
            "P": p,
            "Q": q,
            "X_STRIDE": x.stride,
            "Z_STRIDE": z.stride,
            "Z_SCALES": at.count(node, "z_scale"),
            "SCALES": at.count(node, "scale"),
            "EPS": float(node.attributes["eps"]),
            "BLOCK_P": _TILE,
            "BLOCK_K": _TILE,
            "BLOCK_Q": max(16, next_power_of_2(q)),
        },
        (Size(of=x.rows), Size(times=cdiv(p, _TILE))),
        warps=4,
        stages=3,
    )
