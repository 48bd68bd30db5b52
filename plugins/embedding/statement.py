"""Statements of the embedding, with a table in fp32, fp16, int8 or blocks of 8 or 4 bits."""

from edge.ops import Op, value, weight
from edge.plugins.linear.statement import BITS, PACKED, SCALES

EMBED = Op(
    "Embed",
    (
        value("tokens", "i64[T,B]", "token ids in [0, V)"),
        weight("table", "f32|f16[V,D]", "one row per token"),
    ),
    (value("y", "f32[T,B,D]", "the rows"),),
    (),
    "y[t,b] = table[tokens[t,b]]",
    "ONNX Gather",
)

EMBEDBITS = Op(
    "EmbedBits",
    (value("tokens", "i64[T,B]", "token ids in [0, N)"), PACKED, SCALES),
    (value("y", "f32[T,B,K]", "the rows, dequantized"),),
    BITS,
    "n = tokens[t,b]\ny[t,b,k] = (unpack(packed)[n,k] - 2^(bits-1)) · scales[n, k // block_size]",
    "the layout of com.microsoft.MatMulNBits, so that a tied head shares the table",
)

EMBED_INT8 = Op(
    "EmbedInt8",
    (
        value("tokens", "i64[T,B]", "token ids in [0, V)"),
        weight("table", "i8[V,D]", "one row per token; may be a tied head's weight"),
        weight("scale", "f32[1|V]", "scale of table, one or one per row"),
    ),
    (value("y", "f32[T,B,D]", "the rows, dequantized"),),
    (),
    "v = tokens[t,b]\ny[t,b] = scale[v] · table[v]",
    "ONNX Gather, then DequantizeLinear",
)
