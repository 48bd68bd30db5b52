"""ONNX function bodies of the products.

For ONNX Runtime, integer products are explicit, on u8 activations with zero point 128, so they do
not depend on a fusion.
"""

from edge.plugins.quantize.body import ONE, ZERO

LINEAR = """
    wide = Cast<to=1>(weight)
    columns = Transpose<perm=[1, 0]>(wide)
    y = MatMul(x, columns)
"""

# Unpacks bytes to the two 4-bit columns in each, low nibble first.
NIBBLES = """
    low_mask = Constant<value = uint8 {15}>()
    four = Constant<value = uint8 {4}>()
    low = BitwiseAnd(bytes, low_mask)
    high = BitShift<direction="RIGHT">(bytes, four)
    tail = Constant<value = int64[1] {-1}>()
    low_column = Unsqueeze(low, tail)
    high_column = Unsqueeze(high, tail)
    pairs = Concat<axis=-1>(low_column, high_column)
    block_column = Constant<value_int: int = @block_size>()
    block = Reshape(block_column, tail)
"""

ORT_LINEAR_BITS = """
    y = com.microsoft.MatMulNBits<K: int = @K, N: int = @N, bits: int = @bits,
        block_size: int = @block_size, accuracy_level: int = 4>(x, packed, scales)
"""

# MatMulNBits is fast only with zero points that are whole steps, 8 here. The difference to a
# block's minimum is the same for all its columns, so a small product with the sums of x adds it.
ORT_LINEAR_BITS_MINIMUM = """
    wide = Cast<to=1>(scales)
    least = Cast<to=1>(minimums)
    eight = Constant<value = float {8.0}>()
    half = Mul(wide, eight)
    centres = Add(least, half)
    columns = Transpose<perm=[1, 0]>(centres)
    steps = com.microsoft.MatMulNBits<K: int = @K, N: int = @N, bits: int = @bits,
        block_size: int = @block_size, accuracy_level: int = 4>(x, packed, wide)
    keep = Constant<value = int64[3] {0, 0, -1}>()
    last = Constant<value = int64[1] {-1}>()
    block_column = Constant<value_int: int = @block_size>()
    block = Reshape(block_column, last)
    shape = Concat<axis=0>(keep, block)
    blocks = Reshape(x, shape)
    sums = ReduceSum<keepdims=0>(blocks, last)
    rest = MatMul(sums, columns)
    y = Add(steps, rest)
"""

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
    + ONE
    + """
    quants = DequantizeLinear(x, one)
    product = MatMul(quants, wide)
    y = Mul(product, x_scale)
"""
)

# The weight's zero point is explicit: on processors whose u8·s8 products saturate, ONNX Runtime
# converts weights to u8 and replaces it.
_INTEGER_PRODUCT = (
    _COLUMNS
    + ZERO
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
    ONE
    + "    steps = Div(weight_scale, y_scale)\n"
    + _INTEGER_PRODUCT % {"x_scale": "x_scale", "weight_scale": "steps", "y": "scaled"}
    + "    y = QuantizeLinear(scaled, one, weight_zero)\n"
)

ORT_LINEAR_INT8_ROWS = (
    ONE
    + _INTEGER_PRODUCT % {"x_scale": "one", "weight_scale": "weight_scale", "y": "product"}
    + "    y = Mul(product, x_scale)\n"
)

# In fp32 (accuracy_level 1). Level 4 is 4 times as fast for one token, but quantizes activations a
# second time, by block, which changes the product by 0.4 %.
ORT_LINEAR_INT4 = (
    ZERO
    + """
    floating = DequantizeLinear(x, x_scale, zero)
    y = com.microsoft.MatMulNBits<K: int = @K, N: int = @N, bits: int = @bits,
        block_size: int = @block_size, accuracy_level: int = 1>(floating, packed, scales)
"""
)

# Per-channel QuantizeLinear is slow (see `TO_U8`); dividing first is not.
ORT_LINEAR_INT4_QUANTIZE = (
    ORT_LINEAR_INT4.replace("    y = com", "    product = com")
    + ONE
    + """
    s8_zero = Constant<value = int8 {0}>()
    steps = Div(product, y_scale)
    y = QuantizeLinear(steps, one, s8_zero)
"""
)

ORT_LINEAR_INT4_MINIMUM = (
    ZERO
    + "    floating = DequantizeLinear(x, x_scale, zero)\n"
    + ORT_LINEAR_BITS_MINIMUM.replace("accuracy_level: int = 4", "accuracy_level: int = 1")
    .replace("(x, packed", "(floating, packed")
    .replace("Reshape(x,", "Reshape(floating,")
)

ORT_LINEAR_INT4_MINIMUM_QUANTIZE = (
    ORT_LINEAR_INT4_MINIMUM.replace("    y = Add", "    product = Add")
    + ONE
    + """
    s8_zero = Constant<value = int8 {0}>()
    rounds = Div(product, y_scale)
    y = QuantizeLinear(rounds, one, s8_zero)
"""
)
