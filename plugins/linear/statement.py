"""Statements of products with a weight, of fp32 and int8 activations.

Sums of integer products are exact.
"""

from dataclasses import replace

from edge.ops import Attribute, Op, value, weight
from edge.plugins.quantize.statement import ROUND

BITS = (
    Attribute("K", "int", "columns of the unpacked weight"),
    Attribute("N", "int", "rows of the unpacked weight"),
    Attribute("bits", "int", "8 or 4", (8, 4)),
    Attribute("block_size", "int", "columns that share a scale; divides K"),
)

PACKED = weight(
    "packed",
    "u8[N,K/block_size,block_size·bits/8]",
    "unsigned quants with zero point 2^(bits-1); 4-bit: even columns in the low nibble",
)

SCALES = weight("scales", "f32[N,K/block_size]", "one per block, of either sign")

# the 4-bit weight of LinearBitsMinimum
FROM_MINIMUM = (
    replace(PACKED, doc="quants from 0; even columns in the low nibble"),
    weight("scales", "f16|f32[N,K/block_size]", "one per block, not negative"),
    weight("minimums", "f16|f32[N,K/block_size]", "value of quant 0"),
)

LINEAR = Op(
    "Linear",
    (value("x", "f32[...,I]", "activations"), weight("weight", "f32|f16[O,I]", "rows are outputs")),
    (value("y", "f32[...,O]", "x · weightᵀ in fp32"),),
    (),
    "y = x · weightᵀ; with an f16 weight an implementation may round x to f16, what is larger than "
    "65504 to that; sums are fp32",
    "torch.nn.Linear without bias",
)

LINEAR_BITS = Op(
    "LinearBits",
    (value("x", "f32[...,K]", "activations"), PACKED, SCALES),
    (value("y", "f32[...,N]", "x · dequantized(packed)ᵀ"),),
    BITS,
    "w[n,k] = (unpack(packed)[n,k] - 2^(bits-1)) · scales[n, k // block_size]\ny = x · wᵀ; an "
    "implementation may round x to f16, as Linear, or to int8 per row and block of 32 or "
    "block_size columns",
    "com.microsoft.MatMulNBits, accuracy_level 4",
)

LINEAR_BITS_MINIMUM = Op(
    "LinearBitsMinimum",
    (value("x", "f32[T,B,K]", "activations"), *FROM_MINIMUM),
    LINEAR_BITS.outputs,
    tuple(replace(attribute, forms=()) for attribute in BITS),
    "w[n,k] = unpack(packed)[n,k] · scales[n, k // block_size] + minimums[n, k // block_size]\n"
    "y = x · wᵀ; an implementation may round x as LinearBits; bits is 4",
    "Q4_1 of llama.cpp, whose blocks have 32 columns",
)

_INT8_X = value("x", "i8|u8[...,K]", "activations")

_X_SCALE = weight("x_scale", "f32[1]", "scale of x; one, because the sum runs over channels")

_INT8_WEIGHT = (
    weight("weight", "i8[N,K]", "rows are outputs"),
    weight("weight_scale", "f32[1|N]", "scale of weight, one or one per row"),
)

_PRODUCT = value("y", "f32[...,N]", "not quantized")

_SUM = "x_scale · weight_scale[n] · Σ_k x[k] · weight[n,k]"

LINEAR_INT8 = Op(
    "LinearInt8",
    (_INT8_X, _X_SCALE, *_INT8_WEIGHT),
    (_PRODUCT,),
    (),
    f"y[n] = {_SUM}; the sum is an exact integer",
    "com.microsoft.MatMulIntegerToFloat; Quamba, arXiv 2410.13229, section 4.3",
)

LINEAR_INT8_QUANTIZE = Op(
    "LinearInt8Quantize",
    (_INT8_X, _X_SCALE, *_INT8_WEIGHT, weight("y_scale", "f32[1|N]", "scale of y")),
    (value("y", "i8[...,N]", "quantized"),),
    (),
    f"y[n] = {ROUND.format(f'{_SUM} / y_scale[n]')}; the sum is an exact integer",
    "LinearInt8, then Quantize; ONNX QLinearMatMul",
)

LINEAR_INT8_ROWS = Op(
    "LinearInt8Rows",
    (_INT8_X, value("x_scale", "f32[...,1]", "scale of x, one per row"), *_INT8_WEIGHT),
    (_PRODUCT,),
    (),
    f"y[n] = {_SUM}; the sum is an exact integer",
    "LLM.int8(), arXiv 2208.07339, section 3.1 (vector-wise quantization)",
)

LINEAR_INT4 = Op(
    "LinearInt4",
    (_INT8_X, _X_SCALE, *LINEAR_BITS.without("x")),
    (_PRODUCT,),
    tuple(replace(attribute, forms=()) for attribute in BITS),
    "w[n,k] = unpack(packed)[n,k] - 2^(bits-1)\n"
    "y[n] = x_scale · Σ_b scales[n,b] · Σ_{k in block b} x[k] · w[n,k]; the inner sums are exact "
    "integers; bits is 4",
    "Quamba2, arXiv 2503.22879 (W4A8); the layout of com.microsoft.MatMulNBits",
)

LINEAR_INT4_QUANTIZE = Op(
    "LinearInt4Quantize",
    (*LINEAR_INT4.inputs, weight("y_scale", "f32[1|N]", "scale of y")),
    LINEAR_INT8_QUANTIZE.outputs,
    LINEAR_INT4.attributes,
    "y = round of LinearInt4(x, x_scale, packed, scales) / y_scale, as Quantize rounds",
    "LinearInt4, then Quantize",
)

LINEAR_INT4_MINIMUM = Op(
    "LinearInt4Minimum",
    (value("x", "i8|u8[T,B,K]", "activations"), _X_SCALE, *LINEAR_BITS_MINIMUM.without("x")),
    (_PRODUCT,),
    LINEAR_INT4.attributes,
    "w[n,k] = unpack(packed)[n,k]\n"
    "y[n] = x_scale · Σ_b (scales[n,b] · Σ_{k in block b} x[k] · w[n,k] + minimums[n,b] · "
    "Σ_{k in block b} x[k]); the inner sums are exact integers; bits is 4",
    "LinearInt4, with blocks as LinearBitsMinimum has them",
)

LINEAR_INT4_MINIMUM_QUANTIZE = Op(
    "LinearInt4MinimumQuantize",
    (*LINEAR_INT4_MINIMUM.inputs, weight("y_scale", "f32[1|N]", "scale of y")),
    (value("y", "i8[T,B,N]", "quantized"),),
    LINEAR_INT4.attributes,
    "y = round of LinearInt4Minimum(x, x_scale, packed, scales, minimums) / y_scale, as Quantize "
    "rounds",
    "LinearInt4Minimum, then Quantize",
)
