"""Lowering to the kernels of `rounding`."""

from __future__ import annotations

from edge.launch import Size
from edge.plugins.lowering.context import Lowering, Node, cdiv, next_power_of_2, warps_for

# 4 KB of fp32 per program: one row of 5120 channels is 5 programs.
_BLOCK = 1024


def lower(at: Lowering, node: Node) -> None:
    """Lower the elementwise ops with a known scale: 8 values a thread."""
    x = at.view(node.inputs["x"])
    y = at.new(node.outputs["y"], "i8" if node.op == "Quantize" else "f32", x.rows, x.width)
    block = min(next_power_of_2(x.width), _BLOCK)
    back = {} if node.op == "Dequantize" else {"BACK": node.op == "FakeQuantize"}
    at.launch(
        "rounding.dequantize" if node.op == "Dequantize" else "rounding.quantize",
        {**at.given(node, "x", "scale"), "y": at.pointer(y)},
        {
            "WIDTH": x.width,
            "X_STRIDE": x.stride,
            "SCALES": at.count(node, "scale"),
            **back,
            "BLOCK": block,
        },
        (Size(of=x.rows), Size(times=cdiv(x.width, block))),
        warps=warps_for(block),
    )


def lower_quantize_rows(at: Lowering, node: Node) -> None:
    """Lower the ops with a scale per row: one program a row, which finds the absmax first."""
    x, back = at.view(node.inputs["x"]), node.op == "FakeQuantizeRows"
    y = at.new(node.outputs["y"], "f32" if back else "i8", x.rows, x.width)
    block = next_power_of_2(x.width)
    scale = None if back else at.pointer(at.new(node.outputs["scale"], "f32", x.rows, 1))
    at.launch(
        "rounding.quantize_rows",
        {"x": at.pointer(x), "scale": scale, "y": at.pointer(y)},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "BACK": back, "BLOCK": block},
        (Size(of=x.rows),),
        warps=warps_for(block),
    )


lower_fake_quantize_rows = lower_quantize_rows


def lower_split_quantize_rows(at: Lowering, node: Node) -> None:
    """Lower SplitQuantizeRows, which also outputs the outliers that are not quantized."""
    x = at.view(node.inputs["x"])
    block = next_power_of_2(x.width)
    outputs = {
        "scale": at.pointer(at.new(node.outputs["scale"], "f32", x.rows, 1)),
        "y": at.pointer(at.new(node.outputs["y"], "i8", x.rows, x.width)),
        "outliers": at.pointer(at.new(node.outputs["outliers"], "f32", x.rows, x.width)),
    }
    threshold = float(node.attributes["threshold"])
    at.launch(
        "rounding.split_quantize_rows",
        {"x": at.pointer(x), **outputs},
        {"WIDTH": x.width, "X_STRIDE": x.stride, "THRESHOLD": threshold, "BLOCK": block},
        (Size(of=x.rows),),
        warps=warps_for(block),
    )
