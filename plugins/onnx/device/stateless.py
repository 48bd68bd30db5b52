"""Bodies of the device ops that have no state: those of the domain `edge`, on columns of values."""

from __future__ import annotations

from edge.ops import OPS
from edge.ops.device import DEVICE_OPS, viewable
from edge.ops.spec import Op
from edge.ops.variants import every_variant
from edge.plugins.onnx.device.text import CONSTANTS, call, views


def on_views(name: str, op: Op) -> str:
    """The functional op on what its device op's attributes pick."""
    seen = viewable(DEVICE_OPS[name])
    return CONSTANTS + views(seen) + call(name, op, {v: f"{v}_own" for v in seen}, {})


def on_rows(op: Op) -> str:
    """A norm of the rows that are wanted; the sum is left unread."""
    rows = {"x": "x_rows", "added": "added_rows"}
    text = "".join(f"    {to} = Gather<axis=0>({name}, rows)\n" for name, to in rows.items())
    return text + call(op.name, op, rows, {})


# Bytes that are i8 here hold u8 quants: below 0 they are 256 less. All of it is exact in fp32.
# (TensorRT wants constants of bytes right before a DequantizeLinear, and has no BitwiseAnd.)
_SIGNED = """
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
_QUANTS = {8: _QUANTS_8, 4: _QUANTS_4}


def embed_bits(bits: int) -> str:
    return (
        CONSTANTS
        + _SIGNED
        + "    rows = Gather<axis=0>(signed, tokens)\n"
        + _QUANTS[bits] % {"bytes": "rows"}
        + """
    row_scales = Gather<axis=0>(scales, tokens)
    scale = Unsqueeze(row_scales, end)
    blocks = Mul(centred, scale)
    size = Shape(tokens)
    shape = Concat<axis=0>(size, end)
    y = Reshape(blocks, shape)
"""
    )


def _product(bits: int, x: str, y: str) -> str:
    return (
        _SIGNED
        + _QUANTS[bits] % {"bytes": "signed"}
        + f"""
    scale = Unsqueeze(scales, end)
    blocks = Mul(centred, scale)
    keep = Constant<value = int64[2] {{0, -1}}>()
    wide = Reshape(blocks, keep)
    columns = Transpose<perm=[1, 0]>(wide)
    {y} = MatMul({x}, columns)
"""
    )


def linear_bits(bits: int) -> str:
    return CONSTANTS + views(["x"]) + _product(bits, "x_own", "y")


_FLOATING = "    floating = DequantizeLinear<axis=-1>(x_own, x_scale)\n"
LINEAR_INT4 = CONSTANTS + views(["x"]) + _FLOATING + _product(4, "floating", "y")
LINEAR_INT4_QUANTIZE = (
    CONSTANTS
    + views(["x"])
    + _FLOATING
    + _product(4, "floating", "product")
    + "    y = QuantizeLinear<axis=-1, output_dtype: int=3>(product, y_scale)\n"
)

# Equal logits are told apart by number, which ArgMax leaves to the runtime.
GREEDY = """
    from_0 = Constant<value = int64 {0}>()
    by_1 = Constant<value = int64 {1}>()
    last = Constant<value = int64[1] {-1}>()
    width_1 = Shape<start=-1>(logits)
    width = Squeeze(width_1)
    ids_long = Range(from_0, width, by_1)
    ids = Cast<to=6>(ids_long)
    beyond = Cast<to=6>(width)
    largest = ReduceMax<keepdims=1>(logits, last)
    is_largest = Equal(logits, largest)
    candidates = Where(is_largest, ids, beyond)
    best = ReduceMin<keepdims=0>(candidates, last)
    is_nan = IsNaN(logits)
    nans = Cast<to=6>(is_nan)
    any_nan = ReduceMax<keepdims=0>(nans, last)
    no_nan = Constant<value = int32 {0}>()
    has_nan = Greater(any_nan, no_nan)
    none = Constant<value = int32 {-1}>()
    picked = Where(has_nan, none, best)
"""

# What is written out here, and not by calling the function of the domain `edge`.
_OWN = {
    "EmbedBits_8": embed_bits(8),
    "EmbedBits_4": embed_bits(4),
    "LinearBits_8": linear_bits(8),
    "LinearBits_4": linear_bits(4),
    "LinearInt4": LINEAR_INT4,
    "LinearInt4Quantize": LINEAR_INT4_QUANTIZE,
    "Greedy": GREEDY,
}


def bodies() -> dict[str, str]:
    """Device op → body, for all that have no state and are one op."""
    found = dict(_OWN)
    for op in OPS.values():
        for name in every_variant(op.name):
            device = DEVICE_OPS.get(name)
            if device is not None and name not in found and not any(device.states()):
                found[name] = on_views(name, op)
        if f"{op.name}Rows" in DEVICE_OPS.keys() - OPS.keys():
            found[f"{op.name}Rows"] = on_rows(op)
    return found
