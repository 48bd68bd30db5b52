"""Device ops of the products, where packed bytes are i8."""

from __future__ import annotations

from edge.plugins.device.text import CONSTANTS, views

# i8 bytes hold u8 quants, so negative ones are 256 too small. All of this is exact in fp32.
# (TensorRT requires byte constants to feed a DequantizeLinear directly, and has no BitwiseAnd.)
SIGNED = """
    unit = Constant<value = float {1.0}>()
    nothing = Constant<value = float {0.0}>()
    signed = DequantizeLinear(packed, unit)
"""
_QUANTS_8 = """
    is_below = Less(%(bytes)s, nothing)
    half = Constant<value = float {128.0}>()
    half_less = Constant<value = float {-128.0}>()
    shift = Where(is_below, half, half_less)
    centred = Add(%(bytes)s, shift)
"""
_QUANTS_4 = """
    is_below = Less(%(bytes)s, nothing)
    whole = Constant<value = float {256.0}>()
    shift = Where(is_below, whole, nothing)
    byte = Add(%(bytes)s, shift)
    sixteen = Constant<value = float {16.0}>()
    parts = Div(byte, sixteen)
    high = Floor(parts)
    high_part = Mul(high, sixteen)
    low = Sub(byte, high_part)
    low_column = Unsqueeze(low, end)
    high_column = Unsqueeze(high, end)
    pairs = Concat<axis=-1>(low_column, high_column)
    block_0 = Constant<value_int: int = @block_size>()
    block = Reshape(block_0, end)
    lead = Shape<end=-2>(pairs)
    unpacked_shape = Concat<axis=0>(lead, block)
    unpacked = Reshape(pairs, unpacked_shape)
    eight = Constant<value = float {8.0}>()
    centred = Sub(unpacked, eight)
"""
QUANTS = {8: _QUANTS_8, 4: _QUANTS_4}


_SCALED = """
    scale = Unsqueeze(scales, end)
    blocks = Mul(centred, scale)
"""
_FROM_MINIMUM = """
    wide_scales = Cast<to=1>(scales)
    scale = Unsqueeze(wide_scales, end)
    wide_minimums = Cast<to=1>(minimums)
    minimum = Unsqueeze(wide_minimums, end)
    steps = Mul(unpacked, scale)
    blocks = Add(steps, minimum)
"""


def _product(bits: int, x: str, y: str, scaled: str = _SCALED) -> str:
    return (
        SIGNED
        + QUANTS[bits] % {"bytes": "signed"}
        + scaled
        + f"""
    keep = Constant<value = int64[2] {{0, -1}}>()
    wide = Reshape(blocks, keep)
    columns = Transpose<perm=[1, 0]>(wide)
    {y} = MatMul({x}, columns)
"""
    )


def linear_bits(bits: int) -> str:
    return CONSTANTS + views(["x"]) + _product(bits, "x_own", "y")


LINEAR_BITS_MINIMUM = CONSTANTS + views(["x"]) + _product(4, "x_own", "y", _FROM_MINIMUM)

_FLOATING = "    floating = DequantizeLinear<axis=-1>(x_own, x_scale)\n"
_ROUNDED = "    y = QuantizeLinear<axis=-1, output_dtype: int=3>(product, y_scale)\n"


def _int8_product(y: str, scaled: str = _SCALED) -> str:
    return CONSTANTS + views(["x"]) + _FLOATING + _product(4, "floating", y, scaled)


LINEAR_INT4 = _int8_product("y")
LINEAR_INT4_QUANTIZE = _int8_product("product") + _ROUNDED
LINEAR_INT4_MINIMUM = _int8_product("y", _FROM_MINIMUM)
LINEAR_INT4_MINIMUM_QUANTIZE = _int8_product("product", _FROM_MINIMUM) + _ROUNDED
