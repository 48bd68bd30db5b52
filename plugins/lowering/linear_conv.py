"""How `kernels.linear_conv` is called: LinearInt8QuantizeConv and LinearConv, of few rows."""

from __future__ import annotations

from edge.errors import ExportError
from edge.launch import Size
from edge.ops.quantized_recurrent import CAUSAL_CONV1D_INT8
from edge.ops.recurrent import CAUSAL_CONV1D
from edge.plugins.lowering.context import Arguments, Constant, Lower, Lowering, Node
from edge.plugins.lowering.linear import float_tile
from edge.plugins.lowering.linear_int8 import int8_tile
from edge.plugins.lowering.tiles import launch_product

_SCALES = ("x_scale", "weight_scale", "bias_scale", "y_scale")


def lower_linear_conv(at: Lowering, node: Node) -> None:
    """The product's inputs, then the convolution's but its x; outputs of both.

    The tiles are those of the product. The convolution adds some 2 µs of waiting to a program's
    end, which others of the SM fill, and saves the launch of its own.
    """
    int8 = node.op == "LinearInt8QuantizeConv"
    op = CAUSAL_CONV1D_INT8 if int8 else CAUSAL_CONV1D
    count = 5 if int8 else 2
    x = at.view(node.inputs[0])
    product = [at.constant(name) for name in node.inputs[1:count]]
    names = (v.name for v in op.inputs if v.name != "x")
    given = dict(zip(names, node.inputs[count:], strict=True))
    conv_weight = at.constant(given["weight"])
    scales = {name: at.constant(given[name]) if int8 else None for name in _SCALES}
    weight = product[1 if int8 else 0]
    outputs, columns = weight.shape
    window, channels = conv_weight.shape[0], conv_weight.shape[-1]
    if at.regime.many:
        raise ExportError("is made for few rows", field=node.op)
    y = at.new(node.outputs[0], "i8" if int8 else "f32", "TB", outputs)
    output = at.new(node.outputs[1], y.dtype, "TB", channels)
    prefix = given["conv_state"].removesuffix("conv_state")
    pointers: Arguments = {
        "x": at.pointer(x),
        "x_scale": at.pointer(product[0]) if int8 else None,
        "weight": at.pointer(weight),
        "weight_scale": at.pointer(product[2]) if int8 else None,
        "y_scale": at.pointer(product[3]) if int8 else None,
        "y": at.pointer(y),
        "tap_weight": at.pointer(conv_weight),
        "bias": at.pointer(at.constant(given["bias"])),
        "input_scale": at.pointer(scales["x_scale"]),
        "tap_scale": at.pointer(scales["weight_scale"]),
        "bias_scale": at.pointer(scales["bias_scale"]),
        "output_scale": at.pointer(scales["y_scale"]),
        "state": at.state(given["conv_state"], y.dtype),
        "log": at.log(f"{prefix}conv_in", y.dtype, channels),
        "output": at.pointer(output),
        "run": at.run(),
        "taps": at.input(f"taps{window}", "i32", Size(times=window, of="T")),
        "state_taps": at.input(f"state_taps{window}", "i32", Size(times=window - 1)),
        "kept": at.slots(),
        "tokens": at.size("T"),
        "batch": at.size("B"),
        "slots": at.size("S"),
    }
    constants = {
        "N": outputs,
        "K": columns,
        "X_STRIDE": x.stride,
        "WEIGHT_SCALE_STEP": int(int8 and product[2].size > 1),
        "Y_SCALE_STEP": int(int8 and product[3].size > 1),
        "START": node.attributes["start"],
        "C": channels,
        "WINDOW": window,
        "INPUT_SCALES": _size(scales["x_scale"]),
        "TAP_SCALES": _size(scales["weight_scale"]),
        "BIAS_SCALES": _size(scales["bias_scale"]),
        "OUTPUT_SCALES": _size(scales["y_scale"]),
    }
    tile = (
        int8_tile(at, outputs, columns) if int8 else float_tile(at, weight.dtype, outputs, columns)
    )
    launch_product(at, "linear_conv", pointers, constants, tile, "TB", settles=True)


def _size(scale: Constant | None) -> int:
    return 0 if scale is None else scale.size


LOWER: dict[str, Lower] = dict.fromkeys(("LinearInt8QuantizeConv", "LinearConv"), lower_linear_conv)
