"""Lowering to the kernels `conv` and `linear_conv`, a product fused with the convolution after it.

A convolution moves two bytes (int8) and takes some thirty instructions per value, so it costs
little: in a step, a launch of a few µs (which the fusion with the product saves); in prefill, K
reads of each row, only the first of them from memory.
"""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.plugins.catalogue import OPS
from edge.plugins.causal_conv1d.device import behind_product
from edge.plugins.linear.lowering import float_tile, int8_tile, launch_product
from edge.plugins.lowering.context import Arguments, Lowering, Node, View, cdiv
from edge.plugins.lowering.fuse import Pair

PAIRS = tuple(
    Pair(
        f"{first}Conv",
        first,
        second,
        through=("x",),
        second_names={**behind_product(OPS[second]), "y": "conv_y"},
        split=True,
        few=True,
    )
    for first, second in (("Linear", "CausalConv1d"), ("LinearInt8Quantize", "CausalConv1dInt8"))
)
_SCALES = ("x_scale", "weight_scale", "bias_scale", "y_scale")


def lower(at: Lowering, node: Node) -> None:
    """Launch programs for rows by blocks of channels; those of the first rows also store the state.

    A step has one row per program, so 5120 channels are 40 programs. Prefill has 16, with 16 values
    per thread: one 16-byte load a tap for int8, four for fp32.
    """
    x, width = at.view(node.inputs["x"]), at.constant(node.inputs["weight"]).shape[0]
    y = at.new(node.outputs["y"], "i8" if node.int8 else "f32", "TB", x.width)
    block_m, block_c = (16, 128) if at.regime.many else (1, 128)
    at.launch(
        "conv.conv",
        {**at.given(node, "x", "weight", "bias", *_SCALES), **_memory(at, node, x, y, width)},
        {
            "C": x.width,
            "K": width,
            "X_STRIDE": x.stride,
            **{f"{name.upper()}S": at.count(node, name) for name in _SCALES},
            "BLOCK_M": block_m,
            "BLOCK_C": block_c,
            **({"SILU": False} if node.op == "CausalConvPlain" else {}),
        },
        (Size(times=cdiv(x.width, block_c)), Size(of="TB", per=block_m)),
        warps=4 if at.regime.many else 1,
        stages=1,
        settles=True,
    )


def _memory(at: Lowering, node: Node, x: View, y: View, width: int, output: str = "y") -> Arguments:
    """Return the state, log and output, the index inputs and the sizes as arguments."""
    state = node.inputs["conv_state"]
    return {
        "state": at.state(state, x.dtype),
        "log": at.log(state, "conv_in", x.dtype, y.width),
        output: at.pointer(y),
        "run": at.run(),
        **at.taps(width),
        "kept": at.slots(),
        "tokens": at.size("T"),
        "batch": at.size("B"),
        "slots": at.size("S"),
    }


def lower_linear_conv(at: Lowering, node: Node) -> None:
    """Launch a product fused with a convolution, in the tiles of the product.

    The convolution adds some 2 µs of latency to the end of a program, which other programs on the
    SM hide, and needs no launch of its own.
    """
    x, weight = at.view(node.inputs["x"]), at.constant(node.inputs["weight"])
    outputs, columns = weight.shape
    taps = at.constant(node.inputs["conv_weight"])
    window, channels = taps.shape[0], taps.shape[-1]
    if at.regime.many:
        raise ExportError("takes few rows only", field=node.op)
    y = at.new(node.outputs["y"], "i8" if node.int8 else "f32", "TB", outputs)
    output = at.new(node.outputs["conv_y"], y.dtype, "TB", channels)
    pointers: Arguments = {
        **at.given(node, "x", "x_scale", "weight", "weight_scale", "y_scale"),
        "y": at.pointer(y),
        **at.given(
            node,
            tap_weight="conv_weight",
            bias="conv_bias",
            input_scale="conv_x_scale",
            tap_scale="conv_weight_scale",
            bias_scale="conv_bias_scale",
            output_scale="conv_y_scale",
        ),
        **_memory(at, node, y, output, window, "output"),
    }
    constants = {
        "N": outputs,
        "K": columns,
        "X_STRIDE": x.stride,
        "WEIGHT_SCALE_STEP": int(at.count(node, "weight_scale") > 1),
        "Y_SCALE_STEP": int(at.count(node, "y_scale") > 1),
        "START": node.attributes["start"],
        "C": channels,
        "WINDOW": window,
        "INPUT_SCALES": at.count(node, "conv_x_scale"),
        "TAP_SCALES": at.count(node, "conv_weight_scale"),
        "BIAS_SCALES": at.count(node, "conv_bias_scale"),
        "OUTPUT_SCALES": at.count(node, "conv_y_scale"),
    }
    tile = (
        int8_tile(at, outputs, columns)
        if node.int8
        else float_tile(at, weight.dtype, outputs, columns)
    )
    launch_product(at, "linear_conv", pointers, constants, tile, "TB", settles=True)


lower_linear_int8_quantize_conv = lower_linear_conv
