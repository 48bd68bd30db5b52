"""Bodies of the stateless ops, in the ONNX text syntax; `@name` refers to an attribute."""

from __future__ import annotations

EMBED = """
    rows = Gather<axis=0>(table, tokens)
    y = Cast<to=1>(rows)
"""

# (quant - zero) · scale per block; blocks are laid side by side again by Reshape.
_FROM_BLOCKS = """
    zero = Constant<value = float {%(zero)s.0}>()
    centred = Sub(quants, zero)
    last = Constant<value = int64[1] {-1}>()
    row_scales = Gather<axis=0>(scales, tokens)
    scale = Unsqueeze(row_scales, last)
    blocks = Mul(centred, scale)
    lead = Shape(tokens)
    shape = Concat<axis=0>(lead, last)
    y = Reshape(blocks, shape)
"""

EMBED_BITS_8 = (
    """
    bytes = Gather<axis=0>(packed, tokens)
    quants = Cast<to=1>(bytes)
"""
    + _FROM_BLOCKS % {"zero": 128}
)

_NIBBLES = """
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

EMBED_BITS_4 = (
    """
    bytes = Gather<axis=0>(packed, tokens)
"""
    + _NIBBLES
    + """
    pairs_shape = Shape<end=-2>(pairs)
    unpacked_shape = Concat<axis=0>(pairs_shape, block)
    unpacked_last = Constant<value = int64[1] {-1}>()
    outer = Shape<end=-3>(pairs)
    block_count = Shape<start=-3, end=-2>(pairs)
    full_shape = Concat<axis=0>(outer, block_count, block)
    unpacked = Reshape(pairs, full_shape)
    quants = Cast<to=1>(unpacked)
"""
    + _FROM_BLOCKS % {"zero": 8}
)

LINEAR = """
    wide = Cast<to=1>(weight)
    columns = Transpose<perm=[1, 0]>(wide)
    y = MatMul(x, columns)
"""

_DEQUANTIZE = """
    zero = Constant<value = float {%(zero)s.0}>()
    end = Constant<value = int64[1] {-1}>()
    centred = Sub(quants, zero)
    scale = Unsqueeze(scales, end)
    blocks = Mul(centred, scale)
    keep = Constant<value = int64[2] {0, -1}>()
    wide = Reshape(blocks, keep)
    columns = Transpose<perm=[1, 0]>(wide)
"""
_MULTIPLY = "    y = MatMul(x, columns)\n"

LINEAR_BITS_8 = (
    """
    quants = Cast<to=1>(packed)
"""
    + _DEQUANTIZE % {"zero": 128}
    + _MULTIPLY
)

# A 4-bit weight as `columns`, fp32 [K, N].
COLUMNS_4 = (
    """
    bytes = Identity(packed)
"""
    + _NIBBLES
    + """
    stay = Constant<value = int64[2] {0, 0}>()
    unpacked_shape = Concat<axis=0>(stay, block)
    unpacked = Reshape(pairs, unpacked_shape)
    quants = Cast<to=1>(unpacked)
"""
    + _DEQUANTIZE % {"zero": 8}
)
LINEAR_BITS_4 = COLUMNS_4 + _MULTIPLY

ORT_LINEAR_BITS = """
    y = com.microsoft.MatMulNBits<K: int = @K, N: int = @N, bits: int = @bits,
        block_size: int = @block_size, accuracy_level: int = 4>(x, packed, scales)
"""

# Written the way ONNX Runtime recognises and fuses into one SimplifiedLayerNormalization.
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

GATED = """
    open = Sigmoid(%(z)s)
    gate = Mul(%(z)s, open)
    gated = Mul(x, gate)
"""

NORM_OF_GROUPS = (
    """
    groups_column = Constant<value_int: int = @groups>()
    axes = Constant<value = int64[1] {-1}>()
    group_count = Reshape(groups_column, axes)
    stay = Constant<value = int64[2] {0, 0}>()
    split_shape = Concat<axis=0>(stay, group_count, axes)
    grouped = Reshape(gated, split_shape)
"""
    + RMS % {"x": "grouped"}
    + """
    joined_shape = Constant<value = int64[3] {0, 0, -1}>()
    joined = Reshape(unit, joined_shape)
    y = Mul(joined, weight)
"""
)

# One group needs no reshaping, and is then a norm ONNX Runtime fuses.
NORM_OF_ONE_GROUP = LAST + RMS % {"x": "gated"} + "    y = Mul(unit, weight)\n"

GATED_RMS_NORM = GATED % {"z": "z"} + NORM_OF_GROUPS
GATED_RMS_NORM_1 = GATED % {"z": "z"} + NORM_OF_ONE_GROUP

SILU_GATE = """
    open = Sigmoid(z)
    gate = Mul(z, open)
    y = Mul(x, gate)
"""

GELU = """
    y = Gelu<approximate="none">(x)
"""

GELU_TANH = """
    y = Gelu<approximate="tanh">(x)
"""
