"""Bodies of the int8 ops without state, in the ONNX text syntax.

`standard` is what TensorRT reads: s8 QuantizeLinear and DequantizeLinear around floating products,
and every int8 constant straight into a DequantizeLinear, as it demands.
`ort` writes the integer products out, with u8 activations of zero point 128, instead of hoping that
a fusion finds them. A scale of one value is [1], which ONNX Runtime, ONNX's own evaluator and
TensorRT take for one of the whole tensor, whatever the axis says.
"""

from __future__ import annotations

from edge.plugins.onnx import dense

_ZERO = "    zero = Constant<value = uint8 {128}>()\n"
_ONE = "    one = Constant<value = float {1.0}>()\n"

# -- rounding --------------------------------------------------------------------------------------

_TO_S8 = "    y = QuantizeLinear<axis=-1, output_dtype: int=3>(%(x)s, scale)\n"

# QuantizeLinear by channel goes value by value in ONNX Runtime: 4 ms for 128 × 1536, against 70 µs
# for dividing first. One scale needs no division. Which it is, is known and settled at load.
_TO_U8 = (
    _ZERO
    + """
    scale_count = Size(scale)
    single = Constant<value = int64 {1}>()
    is_single = Equal(scale_count, single)
    y = If(is_single) <
      then_branch = whole () => (uint8[] whole_y) {
        whole_y = QuantizeLinear(%(x)s, scale, zero)
      },
      else_branch = channels () => (uint8[] channels_y) {
        unit_scale = Constant<value = float {1.0}>()
        scaled = Div(%(x)s, scale)
        channels_y = QuantizeLinear(scaled, unit_scale, zero)
      }>
"""
)

QUANTIZE = _TO_S8 % {"x": "x"}
ORT_QUANTIZE = _TO_U8 % {"x": "x"}

_ROW_SCALE = """
    last = Constant<value = int64[1] {-1}>()
    size = Abs(x)
    largest = ReduceMax<keepdims=1>(size, last)
    steps = Constant<value = float {127.0}>()
    found = Div(largest, steps)
    nothing = Constant<value = float {0.0}>()
    is_zero = Equal(found, nothing)
    one = Constant<value = float {1.0}>()
    scale = Where(is_zero, one, found)
    scaled = Div(x, scale)
"""

_ROUND = """
    rounded = Round(scaled)
    lowest = Constant<value = float {-128.0}>()
    highest = Constant<value = float {127.0}>()
    grid = Clip(rounded, lowest, highest)
"""

QUANTIZE_ROWS = _ROW_SCALE + "    y = QuantizeLinear<output_dtype: int=3>(scaled, one)\n"
ORT_QUANTIZE_ROWS = _ROW_SCALE + _ZERO + "    y = QuantizeLinear(scaled, one, zero)\n"

DEQUANTIZE = "    y = DequantizeLinear<axis=-1>(x, scale)\n"
# DequantizeLinear by channel is 5 times slower than this.
ORT_DEQUANTIZE = """
    wide = Cast<to=1>(x)
    y = Mul(wide, scale)
"""

FAKE_QUANTIZE = """
    q = QuantizeLinear<axis=-1, output_dtype: int=3>(x, scale)
    y = DequantizeLinear<axis=-1>(q, scale)
"""
ORT_FAKE_QUANTIZE = "    scaled = Div(x, scale)\n" + _ROUND + "    y = Mul(grid, scale)\n"

FAKE_QUANTIZE_ROWS = _ROW_SCALE + _ROUND + "    y = Mul(grid, scale)\n"

# -- products --------------------------------------------------------------------------------------

_FLOATING_X = "    floating = DequantizeLinear<axis=-1>(x, x_scale)\n"
_COLUMNS = "    columns = Transpose<perm=[1, 0]>(weight)\n"
_WIDE_COLUMNS = """
    wide_rows = DequantizeLinear<axis=0>(weight, weight_scale)
    wide = Transpose<perm=[1, 0]>(wide_rows)
"""
_FLOAT_PRODUCT = _FLOATING_X + _WIDE_COLUMNS + "    %(y)s = MatMul(floating, wide)\n"

LINEAR_INT8 = _FLOAT_PRODUCT % {"y": "y"}
LINEAR_INT8_QUANTIZE = (
    _FLOAT_PRODUCT % {"y": "product"}
    + "    y = QuantizeLinear<axis=-1, output_dtype: int=3>(product, y_scale)\n"
)
LINEAR_INT8_ROWS = (
    _WIDE_COLUMNS
    + _ONE
    + """
    quants = DequantizeLinear(x, one)
    product = MatMul(quants, wide)
    y = Mul(product, x_scale)
"""
)

# The weight's zero point is written out: on processors whose u8·s8 products saturate, ONNX Runtime
# turns weights to u8 and writes the new zero point where the old one stands.
_INTEGER_PRODUCT = (
    _COLUMNS
    + _ZERO
    + """
    weight_zero = Constant<value = int8 {0}>()
    %(y)s = com.microsoft.MatMulIntegerToFloat
        (x, columns, %(x_scale)s, %(weight_scale)s, zero, weight_zero)
"""
)

ORT_LINEAR_INT8 = _INTEGER_PRODUCT % {
    "x_scale": "x_scale", "weight_scale": "weight_scale", "y": "y"
}  # fmt: skip
# As fast as QLinearMatMul, whose output would have to be u8.
ORT_LINEAR_INT8_QUANTIZE = (
    _ONE
    + "    steps = Div(weight_scale, y_scale)\n"
    + _INTEGER_PRODUCT % {"x_scale": "x_scale", "weight_scale": "steps", "y": "scaled"}
    + "    y = QuantizeLinear(scaled, one, weight_zero)\n"
)
ORT_LINEAR_INT8_ROWS = (
    _ONE
    + _INTEGER_PRODUCT % {"x_scale": "one", "weight_scale": "weight_scale", "y": "product"}
    + "    y = Mul(product, x_scale)\n"
)

LINEAR_INT4 = _FLOATING_X + dense.COLUMNS_4 + "    y = MatMul(floating, columns)\n"
# In fp32 (accuracy_level 1): level 4 is 4 times as fast for one token, but rounds the activations a
# second time, block by block, which puts the product off by 0.4 %.
ORT_LINEAR_INT4 = (
    _ZERO
    + """
    floating = DequantizeLinear(x, x_scale, zero)
    y = com.microsoft.MatMulNBits<K: int = @K, N: int = @N, bits: int = @bits,
        block_size: int = @block_size, accuracy_level: int = 1>(floating, packed, scales)
"""
)

LINEAR_INT4_QUANTIZE = (
    _FLOATING_X
    + dense.COLUMNS_4
    + """
    product = MatMul(floating, columns)
    y = QuantizeLinear<axis=-1, output_dtype: int=3>(product, y_scale)
"""
)
# By channel QuantizeLinear is slow (see `_TO_U8`); dividing first is not.
ORT_LINEAR_INT4_QUANTIZE = (
    ORT_LINEAR_INT4.replace("    y = com", "    product = com")
    + _ONE
    + """
    s8_zero = Constant<value = int8 {0}>()
    steps = Div(product, y_scale)
    y = QuantizeLinear(steps, one, s8_zero)
"""
)

# -- norms -----------------------------------------------------------------------------------------

_NORMED = dense.LAST + dense.RMS % {"x": "x"}
_ADD_NORMED = dense.LAST + "    sum = Add(x, added)\n" + dense.RMS % {"x": "sum"}
_NORM_TO_S8 = "    normed = Mul(unit, weight)\n" + _TO_S8 % {"x": "normed"}
# y / scale costs nothing when the weight is divided instead, at load.
_SCALED_WEIGHT = "    steps = Div(weight, scale)\n"
_SCALED_TO_U8 = _ONE + _ZERO + "    y = QuantizeLinear(scaled, one, zero)\n"

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

_GATE = "    gate_in = DequantizeLinear<axis=-1>(z, z_scale)\n" + dense.GATED % {"z": "gate_in"}
_ORT_GATE = (
    """
    quants = Cast<to=1>(z)
    gate_in = Mul(quants, z_scale)
"""
    + dense.GATED % {"z": "gate_in"}
)

# -- rotation --------------------------------------------------------------------------------------

# Only the first and the last Reshape depend on x; the shape of the grid is settled at load.
_ROTATION = """
    rows = Constant<value = int64[1] {-1}>()
    slow_size = Shape<end=1>(slow)
    fast_size = Shape<end=1>(fast)
    grid_shape = Concat<axis=0>(rows, slow_size, fast_size)
    grid = Reshape(x, grid_shape)
    mixed = MatMul(grid, fast)
    turned = MatMul(slow, mixed)
    shape = Shape(x)
    %(y)s = Reshape(turned, shape)
"""

HADAMARD = _ROTATION % {"y": "y"}
HADAMARD_QUANTIZE = _ROTATION % {"y": "rotated"} + _TO_S8 % {"x": "rotated"}
ORT_HADAMARD_QUANTIZE = _ROTATION % {"y": "rotated"} + _TO_U8 % {"x": "rotated"}

# -- embedding -------------------------------------------------------------------------------------

_ROW_SCALES = """
    size = Shape<end=1>(table)
    scales = Expand(scale, size)
    row_scale = Gather<axis=0>(scales, tokens)
    last = Constant<value = int64[1] {-1}>()
    column = Unsqueeze(row_scale, last)
"""
EMBED_INT8 = (
    _ROW_SCALES
    + _ONE
    + """
    floating = DequantizeLinear(table, one)
    wide = Gather<axis=0>(floating, tokens)
    y = Mul(wide, column)
"""
)
ORT_EMBED_INT8 = (
    _ROW_SCALES
    + """
    rows = Gather<axis=0>(table, tokens)
    wide = Cast<to=1>(rows)
    y = Mul(wide, column)
"""
)

# function name → body of standard ops, and what ONNX Runtime does faster, where it differs
BODIES = {
    "Quantize": QUANTIZE,
    "QuantizeRows": QUANTIZE_ROWS,
    "Dequantize": DEQUANTIZE,
    "FakeQuantize": FAKE_QUANTIZE,
    "FakeQuantizeRows": FAKE_QUANTIZE_ROWS,
    "LinearInt8": LINEAR_INT8,
    "LinearInt8Quantize": LINEAR_INT8_QUANTIZE,
    "LinearInt8Rows": LINEAR_INT8_ROWS,
    "LinearInt4": LINEAR_INT4,
    "LinearInt4Quantize": LINEAR_INT4_QUANTIZE,
    "RMSNormQuantize": RMS_NORM_QUANTIZE,
    "AddRMSNormQuantize": ADD_RMS_NORM_QUANTIZE,
    "GatedRMSNormInt8": _GATE + dense.NORM_OF_GROUPS,
    "GatedRMSNormInt8_1": _GATE + dense.NORM_OF_ONE_GROUP,
    "Hadamard": HADAMARD,
    "HadamardQuantize": HADAMARD_QUANTIZE,
    "EmbedInt8": EMBED_INT8,
}
ORT_BODIES = {
    "Quantize": ORT_QUANTIZE,
    "QuantizeRows": ORT_QUANTIZE_ROWS,
    "Dequantize": ORT_DEQUANTIZE,
    "FakeQuantize": ORT_FAKE_QUANTIZE,
    "LinearInt8": ORT_LINEAR_INT8,
    "LinearInt8Quantize": ORT_LINEAR_INT8_QUANTIZE,
    "LinearInt8Rows": ORT_LINEAR_INT8_ROWS,
    "LinearInt4": ORT_LINEAR_INT4,
    "LinearInt4Quantize": ORT_LINEAR_INT4_QUANTIZE,
    "RMSNormQuantize": ORT_RMS_NORM_QUANTIZE,
    "AddRMSNormQuantize": ORT_ADD_RMS_NORM_QUANTIZE,
    "GatedRMSNormInt8": _ORT_GATE + dense.NORM_OF_GROUPS,
    "GatedRMSNormInt8_1": _ORT_GATE + dense.NORM_OF_ONE_GROUP,
    "HadamardQuantize": ORT_HADAMARD_QUANTIZE,
    "EmbedInt8": ORT_EMBED_INT8,
}
