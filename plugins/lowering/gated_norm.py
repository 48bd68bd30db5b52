"""How `kernels.gated_norm` is called: GatedRMSNorm, gated in fp32 or int8, and SiluGate."""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2
from edge.plugins.lowering.hadamard import lower_hadamard
from edge.plugins.lowering.norm import warps_for

_GATE_BLOCK = 512
_TILE = 16  # the smallest of `tl.dot`: most programs for a row, and least padding


def gated_norm(low: Lowering, node: Node) -> None:
    """One program a row and group: 5120 channels are 512 threads of 8 or 16 values.

    What one row takes is the wait for memory and the barriers of the sum, as in `norm`.
    """
    x, z = low.view(node.inputs[0]), low.view(node.inputs[1])
    scale = low.constant(node.inputs[2]) if node.op == "GatedRMSNormInt8" else None
    weight = low.constant(node.inputs[-1])
    groups = node.attributes["groups"]
    if x.width % groups:
        raise ExportError(f"{x.width} channels are not {groups} groups", field=node.name)
    width = x.width // groups
    block = next_power_of_2(width)
    y = low.new(node.outputs[0], "f32", x.rows, x.width)
    low.launch(
        "gated_norm.gated_norm",
        {
            "x": low.pointer(x),
            "z": low.pointer(z),
            "z_scale": low.pointer(scale),
            "weight": low.pointer(weight),
            "y": low.pointer(y),
        },
        {
            "GROUPS": groups,
            "WIDTH": width,
            "BLOCK": block,
            "X_STRIDE": x.stride,
            "Z_STRIDE": z.stride,
            "Z_SCALES": 0 if scale is None else scale.size,
            "EPS": float(node.attributes["eps"]),
        },
        (Size(of=x.rows), Size(times=groups)),
        warps=warps_for(block),
        stages=1,
    )


def silu_gate(low: Lowering, node: Node) -> None:
    """Every row in pieces of 512 channels, 4 a thread."""
    x, z = low.view(node.inputs[0]), low.view(node.inputs[1])
    y = low.new(node.outputs[0], "f32", x.rows, x.width)
    low.launch(
        "gated_norm.silu_gate",
        {"x": low.pointer(x), "z": low.pointer(z), "y": low.pointer(y)},
        {"WIDTH": x.width, "BLOCK": _GATE_BLOCK, "X_STRIDE": x.stride, "Z_STRIDE": z.stride},
        (Size(of=x.rows), Size(times=cdiv(x.width, _GATE_BLOCK))),
        warps=4,
        stages=1,
    )


def gated_norm_hadamard(low: Lowering, node: Node) -> None:
    """The norm inside the rotation: every program gates the whole row, which it reads anyway.

    That is 5120 channels, 40 a thread, in each of the 5 programs of a row of Mamba-2 2.7B (80 x 64,
    16 rows of 80 each); the launch that it spares costs more. Rows of several groups, which have
    several mean squares, are normed by a launch before the rotation's.
    """
    x, z = low.view(node.inputs[0]), low.view(node.inputs[1])
    slow, fast = low.constant(node.inputs[4]), low.constant(node.inputs[5])
    p, q = slow.shape[0], fast.shape[0]
    if p * q != x.width:
        raise ExportError(f"rotates {x.width} values by {p} x {q}", field=node.name)
    if node.attributes["groups"] > 1:
        normed = f"{node.outputs[0]}.normed"
        first = replace(node, op="GatedRMSNormInt8", inputs=node.inputs[:4], outputs=(normed,))
        gated_norm(low, first)
        lower_hadamard(low, replace(node, op="HadamardQuantize", inputs=(normed, *node.inputs[4:])))
        return
    scales = {"z_scale": low.constant(node.inputs[2]), "scale": low.constant(node.inputs[6])}
    y = low.new(node.outputs[0], "i8", x.rows, x.width)
    low.launch(
        "gated_norm.gated_norm_hadamard",
        {
            "x": low.pointer(x),
            "z": low.pointer(z),
            "z_scale": low.pointer(scales["z_scale"]),
            "weight": low.pointer(low.constant(node.inputs[3])),
            "slow": low.pointer(slow),
            "fast": low.pointer(fast),
            "scale": low.pointer(scales["scale"]),
            "y": low.pointer(y),
        },
        {
            "P": p,
            "Q": q,
            "X_STRIDE": x.stride,
            "Z_STRIDE": z.stride,
            "Z_SCALES": scales["z_scale"].size,
            "SCALES": scales["scale"].size,
            "EPS": float(node.attributes["eps"]),
            "BLOCK_P": _TILE,
            "BLOCK_K": _TILE,
            "BLOCK_Q": max(16, next_power_of_2(q)),
        },
        (Size(of=x.rows), Size(times=cdiv(p, _TILE))),
        warps=4,
        stages=3,
    )


LOWER: dict[str, Lower] = {
    "GatedRMSNorm": gated_norm,
    "GatedRMSNormInt8": gated_norm,
    "SiluGate": silu_gate,
    "GatedRMSNormInt8HadamardQuantize": gated_norm_hadamard,
}
