"""ONNX function bodies of the norms."""

from __future__ import annotations

from edge.plugins.quantize.body import ONE, TO_S8, ZERO

# ONNX Runtime recognizes this form and fuses it into one SimplifiedLayerNormalization.
RMS = """
    two = Constant<value = float {2.0}>()
    square = Pow(%(x)s, two)
    mean = ReduceMean<keepdims=1>(square, axes)
    small = Constant<value_float: float = @eps>()
    shifted = Add(mean, small)
    root = Sqrt(shifted)
    unit = Div(%(x)s, root)
"""

LAST = "    axes = Constant<value = int64[1] {-1}>()\n"

RMS_NORM = LAST + RMS % {"x": "x"} + "    y = Mul(unit, weight)\n"

ADD_RMS_NORM = (
    LAST + "    sum = Add(x, added)\n" + RMS % {"x": "sum"} + "    y = Mul(unit, weight)\n"
)

ORT_ADD_RMS_NORM = """
    y, unused_mean, unused_root, sum = com.microsoft.SkipSimplifiedLayerNormalization
        <epsilon: float = @eps>(x, added, weight)
"""

LAYER_NORM = """
    y = LayerNormalization<axis=-1, epsilon: float = @eps>(x, weight, bias)
"""

ADD_LAYER_NORM = """
    sum = Add(x, added)
    y = LayerNormalization<axis=-1, epsilon: float = @eps>(sum, weight, bias)
"""

ORT_ADD_LAYER_NORM = """
    y, unused_mean, unused_root, sum = com.microsoft.SkipLayerNormalization
        <epsilon: float = @eps>(x, added, weight, bias)
"""

_NORMED = LAST + RMS % {"x": "x"}

_ADD_NORMED = LAST + "    sum = Add(x, added)\n" + RMS % {"x": "sum"}

_NORM_TO_S8 = "    normed = Mul(unit, weight)\n" + TO_S8 % {"x": "normed"}

# Dividing the weight by the scale, once at load, makes y / scale free.
_SCALED_WEIGHT = "    steps = Div(weight, scale)\n"

_SCALED_TO_U8 = ONE + ZERO + "    y = QuantizeLinear(scaled, one, zero)\n"

RMS_NORM_QUANTIZE = _NORMED + _NORM_TO_S8

ORT_RMS_NORM_QUANTIZE = _SCALED_WEIGHT + _NORMED + "    scaled = Mul(unit, steps)\n" + _SCALED_TO_U8

ADD_RMS_NORM_QUANTIZE = _ADD_NORMED + _NORM_TO_S8

ORT_ADD_RMS_NORM_QUANTIZE = (
    _SCALED_WEIGHT
    + """
    scaled, unused_mean, unused_root, sum = com.microsoft.SkipSimplifiedLayerNormalization
        <epsilon: float = @eps>(x, added, steps)
"""
    + _SCALED_TO_U8
)


def norm_of_groups(x: str) -> str:
    """Return nodes that norm `groups` parts of each row of `x`, and weight the whole row."""
    return (
        f"""
    groups_column = Constant<value_int: int = @groups>()
    axes = Constant<value = int64[1] {{-1}}>()
    group_count = Reshape(groups_column, axes)
    stay = Constant<value = int64[2] {{0, 0}}>()
    split_shape = Concat<axis=0>(stay, group_count, axes)
    grouped = Reshape({x}, split_shape)
"""
        + RMS % {"x": "grouped"}
        + """
    joined_shape = Constant<value = int64[3] {0, 0, -1}>()
    joined = Reshape(unit, joined_shape)
    y = Mul(joined, weight)
"""
    )
