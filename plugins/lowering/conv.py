"""How `kernels.conv` is called: the convolution of fp32 or int8 values, and its state.

A convolution moves two bytes (int8) for some thirty instructions a value, so it is worth little on
its own: in a step it is a launch of a few µs (the planner joins it to the product before it), and
in prefill it reads each row K times, of which the first alone comes from memory.
"""

from __future__ import annotations

from edge.launch import Size
from edge.ops.quantized_recurrent import CAUSAL_CONV1D_INT8
from edge.ops.recurrent import CAUSAL_CONV1D
from edge.plugins.lowering.context import Lower, Lowering, Node, cdiv


def lower_conv(at: Lowering, node: Node) -> None:
    """Rows of tokens by blocks of channels; the first rows' programs also store the state.

    A step has one row a program, so that 5120 channels are 40 programs; prefill has 16, and a
    thread 16 values of it: one 16-byte load a tap of int8 values, four of fp32.
    """
    int8 = node.op == "CausalConv1dInt8"
    op = CAUSAL_CONV1D_INT8 if int8 else CAUSAL_CONV1D
    given = dict(zip((v.name for v in op.inputs), node.inputs, strict=True))
    x, weight = at.view(given["x"]), at.constant(given["weight"])
    width = weight.shape[0]
    y = at.new(node.outputs[0], "i8" if int8 else "f32", "TB", x.width)
    scales = {
        name: at.constant(given[name]) if int8 else None
        for name in ("x_scale", "weight_scale", "bias_scale", "y_scale")
    }
    prefix = given["conv_state"].removesuffix("conv_state")
    block_m, block_c = (16, 128) if at.regime.many else (1, 128)
    at.launch(
        "conv.conv",
        {
            "x": at.pointer(x),
            "weight": at.pointer(weight),
            "bias": at.pointer(at.constant(given["bias"])),
            **{name: at.pointer(one) for name, one in scales.items()},
            "state": at.state(given["conv_state"], x.dtype),
            "log": at.log(f"{prefix}conv_in", x.dtype, x.width),
            "y": at.pointer(y),
            "run": at.run(),
            "taps": at.input(f"taps{width}", "i32", Size(times=width, of="T")),
            "state_taps": at.input(f"state_taps{width}", "i32", Size(times=width - 1)),
            "kept": at.slots(),
            "tokens": at.size("T"),
            "batch": at.size("B"),
            "slots": at.size("S"),
        },
        {
            "C": x.width,
            "K": width,
            "X_STRIDE": x.stride,
            **{f"{n.upper()}S": 0 if one is None else one.size for n, one in scales.items()},
            "BLOCK_M": block_m,
            "BLOCK_C": block_c,
        },
        (Size(times=cdiv(x.width, block_c)), Size(of="TB", per=block_m)),
        warps=4 if at.regime.many else 1,
        stages=1,
        settles=True,
    )


LOWER: dict[str, Lower] = {"CausalConv1d": lower_conv, "CausalConv1dInt8": lower_conv}
