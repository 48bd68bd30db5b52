"""ONNX function bodies of the convolution."""

from __future__ import annotations

from string import Template

from edge.plugins.quantize.body import STEPS_AND_ZEROS, widened_constants

# Taps are summed by a product with ones: for one token of 1536 channels, ReduceSum takes 5 µs, more
# than everything else here, and the product with its two reshapes 1.5 µs.
_CONVOLUTION = Template("""
    inputs = Concat<axis=0>(conv_state, x)
    windows = Gather<axis=0>(inputs, taps)
    conv_states = Gather<axis=0>(inputs, kept_taps)
    $widen
    products = Mul($windows, $weight)
    flat = Constant<value = int64[3] {0, 0, -1}>()
    rows = Reshape(products, flat)
    tap_count = Shape<start=0, end=1>(weight)
    ones = ConstantOfShape<value = float[1] {1.0}>(tap_count)
    sums = MatMul(ones, rows)
    shape = Shape(x)
    summed = Reshape(sums, shape)
    $biased = Add(summed, $bias)
""")
_SILU = """
    open = Sigmoid(biased)
    %(y)s = Mul(biased, open)
"""


def causal_conv1d(
    y: str = "y",
    windows: str = "windows",
    weight: str = "weight",
    bias: str = "bias",
    widen: str = "",
) -> str:
    """Return the body in fp32 on values of these names. `widen` has nodes that make the inputs."""
    text = _CONVOLUTION.substitute(
        biased="biased", windows=windows, weight=weight, bias=bias, widen=widen
    )
    return text + _SILU % {"y": y}


def causal_conv_plain() -> str:
    """Return the body in fp32 without SiLU."""
    return _CONVOLUTION.substitute(
        biased="y", windows="windows", weight="weight", bias="bias", widen=""
    )


_CONV_WIDEN = """
    weight_of_steps = Mul(weight_wide, x_scale)
    windows_wide = Cast<to=1>(windows)
"""

# Per-channel QuantizeLinear takes 30 µs for 1536 numbers, dividing first 3 µs. A single scale needs
# no division.
_ROUNDED = """
    steps = Div(y_wide, y_scale)
    y = QuantizeLinear(steps, one_step, zero_s8)
"""
_ORT_ROUNDED = """
    y_count = Size(y_scale)
    y_single = Equal(y_count, single)
    y = If(y_single) <
      then_branch = whole () => (uint8[] y_whole) {
        y_whole = QuantizeLinear(y_wide, y_scale, zero_u8)
      },
      else_branch = channels () => (uint8[] y_channels) {
        steps = Div(y_wide, y_scale)
        y_channels = QuantizeLinear(steps, one_step, zero_u8)
      }>
"""


def causal_conv1d_int8(ort: bool) -> str:
    """Return a body that dequantizes and continues as the float one."""
    widen = widened_constants(ort, "weight", "bias") + _CONV_WIDEN
    text = causal_conv1d("y_wide", "windows_wide", "weight_of_steps", "bias_wide", widen)
    return STEPS_AND_ZEROS + text + (_ORT_ROUNDED if ort else _ROUNDED)
