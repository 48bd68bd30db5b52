"""ONNX function bodies of routing, of products with the chosen experts and of their sum.

The plain bodies gather one weight per slot: they are short, but their cost grows with the run. The
bodies for ONNX Runtime loop over the chosen experts and read each weight once a run.
"""

from __future__ import annotations

from string import Template

from edge.plugins.linear.body import NIBBLES
from edge.plugins.quantize.body import QUANTIZE_ROWS, ZERO

# -- the router -----------------------------------------------------------------------------------

_SCORE = """
    flat = Constant<value = int64[1] {-1}>()
    sigmoid_0 = Constant<value_int: int = @sigmoid>()
    is_sigmoid = Cast<to=9>(sigmoid_0)
    shares = Softmax<axis=-1>(logits)
    each = Sigmoid(logits)
    score = Where(is_sigmoid, each, shares)
    ranked = Add(score, bias)
"""
_GROUPS = """
    last_1 = Constant<value = int64[1] {-1}>()
    groups_0 = Constant<value_int: int = @groups>()
    groups_1 = Reshape(groups_0, last_1)
    top_groups_0 = Constant<value_int: int = @top_groups>()
    top_groups_1 = Reshape(top_groups_0, last_1)
    whole = Shape(ranked)
    lead = Shape<end=-1>(ranked)
    split = Concat<axis=0>(lead, groups_1, last_1)
    apart = Reshape(ranked, split)
    members = Shape<start=-1>(apart)
    two = Constant<value = int64[1] {2}>()
    few = Min(members, two)
    best_two, best_two_at = TopK<axis=-1>(apart, few)
    worth = ReduceSum<keepdims=0>(best_two, last_1)
    best, best_at = TopK<axis=-1>(worth, top_groups_1)
    low = Constant<value = float[1] {-3.0e38}>()
    low_everywhere = Min(worth, low)
    kept = Sub(best, best)
    closed = ScatterElements<axis=-1>(low_everywhere, best_at, kept)
    closed_column = Unsqueeze(closed, last_1)
    nothing = Constant<value = float {0.0}>()
    is_open = Equal(closed_column, nothing)
    bounded = Where(is_open, apart, closed_column)
    open = Reshape(bounded, whole)
"""
_CHOICE = """
    k_0 = Constant<value_int: int = @k>()
    k_1 = Reshape(k_0, flat)
    largest, at = TopK<axis=-1>(open, k_1)
    taken = GatherElements<axis=-1>(score, at)
    chosen = Cast<to=6>(at)
    total = ReduceSum<keepdims=1>(taken, flat)
    normalise_0 = Constant<value_int: int = @normalise>()
    is_shared = Cast<to=9>(normalise_0)
    unit = Constant<value = float {1.0}>()
    divisor = Where(is_shared, total, unit)
    shared = Div(taken, divisor)
    factor = Constant<value_float: float = @scale>()
    gates = Mul(shared, factor)
"""


def route(groups: int | None) -> str:
    """Return the body of routing. ONNX's TopK takes the first of equal values."""
    return _SCORE + (_GROUPS if groups is None else "    open = Identity(ranked)\n") + _CHOICE


# Pairs are sorted by expert · P + pair number, so that no two keys are equal.
EXPERT_ORDER = """
    flat = Constant<value = int64[1] {-1}>()
    pairs_i32 = Reshape(chosen, flat)
    pairs = Cast<to=7>(pairs_i32)
    pair_count = Size(pairs)
    zero = Constant<value = int64 {0}>()
    one = Constant<value = int64 {1}>()
    numbers = Range(zero, pair_count, one)
    by_expert = Mul(pairs, pair_count)
    keys = Add(by_expert, numbers)
    count_1 = Reshape(pair_count, flat)
    ascending, places = TopK<axis=0, largest=0>(keys, count_1)
    order_i32 = Cast<to=6>(places)
    shape = Shape(chosen)
    order = Reshape(order_i32, shape)
"""

# -- products -------------------------------------------------------------------------------------

# rows [R, K] of x; the expert of each of the P (token, slot) pairs; the number of pairs that read a
# row. `columns` int64 [1] is K. P is from Size, not Shape: ONNX Runtime may fold a Shape, and would
# then compute arrays of that size while it loads a graph (runtime/folding.py).
_PAIRS = """
    flat = Constant<value = int64[1] {-1}>()
    pairs_i32 = Reshape(chosen, flat)
    pairs = Cast<to=7>(pairs_i32)
    pair_size = Size(pairs)
    pair_count = Reshape(pair_size, flat)
    rows_shape = Concat<axis=0>(flat, columns)
    rows = Reshape(x, rows_shape)
    row_count = Shape<end=1>(rows)
    readers = Div(pair_count, row_count)
"""
_WEIGHT = """
    columns = Shape<start=2>(weight)
    outputs = Shape<start=1, end=2>(weight)
"""
PACKED = """
    attribute_shape = Constant<value = int64[1] {-1}>()
    K_0 = Constant<value_int: int = @K>()
    N_0 = Constant<value_int: int = @N>()
    columns = Reshape(K_0, attribute_shape)
    outputs = Reshape(N_0, attribute_shape)
"""
# each_y [P, N] → y
_JOINED = """
    parts_0 = Constant<value_int: int = @parts>()
    parts_1 = Reshape(parts_0, flat)
    of_part = Div(outputs, parts_1)
    lead = Shape<end=-1>(chosen)
    slots = Shape<start=-1>(chosen)
    by_slot = Concat<axis=0>(flat, slots, parts_1, of_part)
    each_slots = Reshape(each_y, by_slot)
    by_part = Transpose<perm=[0, 2, 1, 3]>(each_slots)
    y_shape = Concat<axis=0>(lead, flat)
    y = Reshape(by_part, y_shape)
"""
# x of every pair, [P, K]
_SPREAD = """
    one_1 = Constant<value = int64[1] {1}>()
    rows_apart = Unsqueeze(rows, one_1)
    spread_shape = Concat<axis=0>(one_1, readers, one_1)
    spread = Expand(rows_apart, spread_shape)
    pair_x = Reshape(spread, rows_shape)
"""
_GATHERED = """
    pair_row = Unsqueeze(pair_x, one_1)
    turned = Transpose<perm=[0, 2, 1]>(wide)
    product = MatMul(pair_row, turned)
    each_shape = Concat<axis=0>(flat, outputs)
    each_y = Reshape(product, each_shape)
"""
ROUNDED = (
    QUANTIZE_ROWS.replace("(x)", "(pair_x)").replace("Div(x,", "Div(pair_x,").replace(" y ", " q ")
    + "    q_float = DequantizeLinear(q, one)\n"
)
_BY_STEP = "    each_y = Mul(unscaled, scale)\n"


def plain(shapes: str, rounds: str, weights: str) -> str:
    """Return a plain body. `weights` has nodes that make `wide` [P, N, K] for every pair, `rounds`
    those that make `q_float` and `scale` from its x.
    """
    product = _GATHERED
    if rounds:
        product = product.replace("Unsqueeze(pair_x,", "Unsqueeze(q_float,")
        product = product.replace("each_y = Reshape", "unscaled = Reshape") + _BY_STEP
    return shapes + _PAIRS + _SPREAD + rounds + weights + product + _JOINED


_WIDE_BITS = {
    8: "    quants = Gather(packed, pairs)\n",
    4: "    bytes = Gather(packed, pairs)\n"
    + NIBBLES
    + """
    lead_shape = Shape<end=-1>(bytes)
    quants_shape = Concat<axis=0>(lead_shape, block)
    quants = Reshape(pairs_of_columns, quants_shape)
""",
}


_CENTRED = """
    middle = Constant<value = float {%s.0}>()
    centred = Sub(quants_wide, middle)
    block_scales = Gather(scales, pairs)
    scale_column = Unsqueeze(block_scales, scale_axis)
    wide_blocks = Mul(centred, scale_column)
"""
_FROM_MINIMUM = """
    own_scales = Gather(scales, pairs)
    block_scales = Cast<to=1>(own_scales)
    scale_column = Unsqueeze(block_scales, scale_axis)
    own_minimums = Gather(minimums, pairs)
    block_minimums = Cast<to=1>(own_minimums)
    minimum_column = Unsqueeze(block_minimums, scale_axis)
    by_scale = Mul(quants_wide, scale_column)
    wide_blocks = Add(by_scale, minimum_column)
"""


def _bits(bits: int, minimum: bool = False) -> str:
    return (
        _WIDE_BITS[bits].replace("pairs = Concat", "pairs_of_columns = Concat")
        + """
    quants_wide = Cast<to=1>(quants)
    scale_axis = Constant<value = int64[1] {-1}>()
"""
        + (_FROM_MINIMUM if minimum else _CENTRED % (1 << (bits - 1)))
        + """
    wide_shape = Concat<axis=0>(flat, outputs, columns)
    wide = Reshape(wide_blocks, wide_shape)
"""
    )


EXPERT_LINEAR = plain(_WEIGHT, "", "    own = Gather(weight, pairs)\n    wide = Cast<to=1>(own)\n")
EXPERT_LINEAR_INT8 = plain(
    _WEIGHT,
    ROUNDED,
    """
    weight_float = DequantizeLinear(weight, one)
    own = Gather(weight_float, pairs)
    own_scale = Gather(weight_scale, pairs)
    own_column = Unsqueeze(own_scale, last)
    wide = Mul(own, own_column)
""",
)
EXPERT_LINEAR_INT4 = plain(PACKED, ROUNDED, _bits(4))
EXPERT_LINEAR_BITS_MINIMUM = plain(PACKED, "", _bits(4, minimum=True))
EXPERT_LINEAR_INT4_MINIMUM = plain(PACKED, ROUNDED, _bits(4, minimum=True))


def expert_linear_bits(bits: int) -> str:
    return plain(PACKED, "", _bits(bits))


# -- products for ONNX Runtime --------------------------------------------------------------------

_LOOP = Template("""
    experts, first_at, inverse, counts = Unique<sorted=1>(pairs)
    trips = Size(experts)
    all_shape = Concat<axis=0>(pair_count, outputs)
    empty = ConstantOfShape(all_shape)
    going = Constant<value = int64 {1}>()
    go = Cast<to=9>(going)
    each_y = Loop<body = expert_by_expert (int64 i, bool on, float[P, N] before)
        => (bool still, float[P, N] after) {
      still = Identity(on)
      expert = Gather(experts, i)
      is_here = Equal(pairs, expert)
      here = NonZero(is_here)
      column = Transpose(here)
      minus = Constant<value = int64[1] {-1}>()
      places = Reshape(here, minus)
      sources = Div(places, readers)
      own_x = Gather(rows, sources)
$product
      after = ScatterND(before, column, own_y)
    }>(trips, go, empty)
""")


def _ort(shapes: str, product: str) -> str:
    return shapes + _PAIRS + _LOOP.substitute(product=product) + _JOINED


# Each block is summed on its own, then its zero point is subtracted and it is scaled, or it is
# scaled and its minimum added. MatMulNBits takes 4 times as long, because it dequantizes weights
# that are not constants.
_BLOCKS = Template("""
      own_packed = Gather(packed, expert)
      own_scales = Gather(scales, expert)
      block_count = Shape<start=1>(own_scales)
      block_size_0 = Constant<value_int: int = @block_size>()
      block_size_1 = Reshape(block_size_0, minus)
      by_block = Concat<axis=0>(minus, block_count, block_size_1)
      x_blocks = Reshape($x, by_block)
      x_columns = Transpose<perm=[1, 2, 0]>(x_blocks)
$products
      inner = Constant<value = int64[1] {1}>()
      x_sums = ReduceSum<keepdims=1>(x_columns, inner)
$weighed
      outer = Constant<value = int64[1] {0}>()
      turned_y = ReduceSum<keepdims=0>(weighed, outer)
      $y = Transpose<perm=[1, 0]>(turned_y)
""")
_FROM_MIDDLE = """
      zero_point = Constant<value = float {%s.0}>()
      excess = Mul(x_sums, zero_point)
      centred = Sub(products, excess)
      scale_rows = Transpose<perm=[1, 0]>(own_scales)
      scale_columns = Unsqueeze(scale_rows, minus)
      weighed = Mul(centred, scale_columns)
"""
_BY_MINIMUM = """
      wide_scales = Cast<to=1>(own_scales)
      scale_rows = Transpose<perm=[1, 0]>(wide_scales)
      scale_columns = Unsqueeze(scale_rows, minus)
      own_minimums = Gather(minimums, expert)
      wide_minimums = Cast<to=1>(own_minimums)
      minimum_rows = Transpose<perm=[1, 0]>(wide_minimums)
      minimum_columns = Unsqueeze(minimum_rows, minus)
      by_scale = Mul(products, scale_columns)
      by_minimum = Mul(x_sums, minimum_columns)
      weighed = Add(by_scale, by_minimum)
"""
_PRODUCTS = {
    8: """
      bytes_wide = Cast<to=1>(own_packed)
      bytes_turned = Transpose<perm=[1, 0, 2]>(bytes_wide)
      products = MatMul(bytes_turned, x_columns)
""",
    4: """
      two = Constant<value = int64[1] {2}>()
      pair_shape = Concat<axis=0>(block_count, minus, two, row_count_own)
      x_pairs = Reshape(x_columns, pair_shape)
      even_x, odd_x = Split<axis=2, num_outputs=2>(x_pairs)
      even_columns = Squeeze(even_x, two)
      odd_columns = Squeeze(odd_x, two)
      low_mask = Constant<value = uint8 {15}>()
      four = Constant<value = uint8 {4}>()
      turned = Transpose<perm=[1, 0, 2]>(own_packed)
      low = BitwiseAnd(turned, low_mask)
      high = BitShift<direction="RIGHT">(turned, four)
      low_wide = Cast<to=1>(low)
      high_wide = Cast<to=1>(high)
      of_even = MatMul(low_wide, even_columns)
      of_odd = MatMul(high_wide, odd_columns)
      products = Add(of_even, of_odd)
""",
}


def _blocks(bits: int, x: str, y: str, minimum: bool = False) -> str:
    weighed = _BY_MINIMUM if minimum else _FROM_MIDDLE % (1 << (bits - 1))
    products = "      row_count_own = Shape<end=1>(own_x)\n" + _PRODUCTS[bits]
    return _BLOCKS.substitute(x=x, y=y, products=products, weighed=weighed)


_OWN_ROUNDED = QUANTIZE_ROWS.replace("(x)", "(own_x)").replace("Div(x,", "Div(own_x,")

ORT_EXPERT_LINEAR = _ort(
    _WEIGHT,
    """
      own_w = Gather(weight, expert)
      wide_w = Cast<to=1>(own_w)
      own_y = Gemm<transB=1>(own_x, wide_w)
""",
)


def ort_expert_linear_bits(bits: int) -> str:
    return _ort(PACKED, _blocks(bits, "own_x", "own_y"))


# u8 by u8, with zero point 128: on processors whose u8 by s8 products saturate, ONNX Runtime
# converts only constants to u8.
ORT_EXPERT_LINEAR_INT8 = _ort(
    _WEIGHT,
    _OWN_ROUNDED.replace("y = QuantizeLinear<output_dtype: int=3>(scaled, one)", ZERO.strip())
    + """
      own_q = QuantizeLinear(scaled, one, zero)
      own_w = Gather(weight, expert)
      own_bytes = Cast<to=2>(own_w)
      own_u8 = BitwiseXor(own_bytes, zero)
      own_columns = Transpose<perm=[1, 0]>(own_u8)
      own_scale = Gather(weight_scale, expert)
      unscaled = com.microsoft.MatMulIntegerToFloat
          (own_q, own_columns, one, own_scale, zero, zero)
      own_y = Mul(unscaled, scale)
""",
)


def _int4(minimum: bool) -> str:
    return _ort(
        PACKED,
        _OWN_ROUNDED.replace(" y ", " own_q ")
        + "      q_float = Cast<to=1>(own_q)\n"
        + _blocks(4, "q_float", "unscaled", minimum)
        + "      own_y = Mul(unscaled, scale)\n",
    )


ORT_EXPERT_LINEAR_INT4 = _int4(minimum=False)
ORT_EXPERT_LINEAR_INT4_MINIMUM = _int4(minimum=True)
ORT_EXPERT_LINEAR_BITS_MINIMUM = _ort(PACKED, _blocks(4, "own_x", "own_y", minimum=True))

# -- the sum --------------------------------------------------------------------------------------

EXPERT_SUM = """
    lead = Shape<end=-1>(gates)
    slots = Shape<start=-1>(gates)
    rest = Constant<value = int64[1] {-1}>()
    by_slot = Concat<axis=0>(lead, slots, rest)
    apart = Reshape(x, by_slot)
    column = Unsqueeze(gates, rest)
    weighed = Mul(apart, column)
    slot_axis = Constant<value = int64[1] {-2}>()
    y = ReduceSum<keepdims=0>(weighed, slot_axis)
"""
