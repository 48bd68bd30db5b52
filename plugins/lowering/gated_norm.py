"""How `kernels.gated_norm` is called: GatedRMSNorm, with a gate in fp32 or int8, and SiluGate."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2
from edge.plugins.lowering.norm import warps_for

_GATE_BLOCK = 512


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


LOWER: dict[str, Lower] = {
    "GatedRMSNorm": gated_norm,
    "GatedRMSNormInt8": gated_norm,
    "SiluGate": silu_gate,
}
