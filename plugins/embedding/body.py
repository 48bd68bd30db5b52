"""ONNX function bodies of the embedding."""

from edge.plugins.linear.body import NIBBLES
from edge.plugins.quantize.body import ONE

EMBED = """
    rows = Gather<axis=0>(table, tokens)
    y = Cast<to=1>(rows)
"""

# (quant - zero) · scale per block; Reshape joins the blocks of a row.
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

EMBED_BITS_4 = (
    """
    bytes = Gather<axis=0>(packed, tokens)
"""
    + NIBBLES
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

_ROW_SCALES = """
    size = Shape<end=1>(table)
    scales = Expand(scale, size)
    row_scale = Gather<axis=0>(scales, tokens)
    last = Constant<value = int64[1] {-1}>()
    column = Unsqueeze(row_scale, last)
"""

EMBED_INT8 = (
    _ROW_SCALES
    + ONE
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
