"""How `kernels.rounding` is called: (Fake)Quantize, (Fake)QuantizeRows, Dequantize."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv, next_power_of_2
from edge.plugins.lowering.norm import warps_for

# 4 KB of fp32 a program: one row of 5120 channels is 5 programs.
_BLOCK = 1024


def lower_known(at: Lowering, node: Node) -> None:
    """Quantize, FakeQuantize, Dequantize: 8 values a thread, every value on its own."""
    x, scale = at.view(node.inputs[0]), at.constant(node.inputs[1])
    y = at.new(node.outputs[0], "i8" if node.op == "Quantize" else "f32", x.rows, x.width)
    block = min(next_power_of_2(x.width), _BLOCK)
    constants: dict[str, int] = {"WIDTH": x.width, "X_STRIDE": x.stride, "SCALES": scale.size}
    if node.op != "Dequantize":
        constants["BACK"] = node.op == "FakeQuantize"
    at.launch(
        "rounding.dequantize" if node.op == "Dequantize" else "rounding.quantize",
        {"x": at.pointer(x), "scale": at.pointer(scale), "y": at.pointer(y)},
        {**constants, "BLOCK": block},
        (Size(of=x.rows), Size(times=cdiv(x.width, block))),
        warps=warps_for(block),
    )


def lower_rows(at: Lowering, node: Node) -> None:
    """QuantizeRows, FakeQuantizeRows: a program a row, which finds the largest value first."""
    x, back = at.view(node.inputs[0]), node.op == "FakeQuantizeRows"
    y = at.new(node.outputs[0], "f32" if back else "i8", x.rows, x.width)
    block = next_power_of_2(x.width)
    scale = None if back else at.pointer(at.new(node.outputs[1], "f32", x.rows, 1))
    at.launch(
        "rounding.quantize_rows",
        {"x": at.pointer(x), "scale": scale, "y": at.pointer(y)},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "BACK": back, "BLOCK": block},
        (Size(of=x.rows),),
        warps=warps_for(block),
    )


LOWER: dict[str, Lower] = {
    "Quantize": lower_known,
    "FakeQuantize": lower_known,
    "Dequantize": lower_known,
    "QuantizeRows": lower_rows,
    "FakeQuantizeRows": lower_rows,
}
