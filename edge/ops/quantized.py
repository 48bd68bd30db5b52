"""Rounding to int8, and the stateless ops on int8 values.

All rounding is q = clip(round_half_even(x / scale), -128, 127), symmetric, with fp32 scales; what a
number then stands for is q · scale. Sums of products of integers are exact. A scale of [1|C] is one
for all values, or one a channel of the last axis.

i8|u8: an int8 value that only products and scans read may travel as u8 with 128 added, which is
what the `ort` flavour of the ONNX functions does (products of u8 by s8 are the fast ones on x86).
The numbers are the same. A value written i8 alone is signed in every flavour.
"""

from __future__ import annotations

from edge.ops.dense import ADD_RMS_NORM, GATED_RMS_NORM, LINEAR_BITS, RMS_NORM
from edge.ops.spec import Op, value, weight

_X = value("x", "f32[...,C]", "activations")
_SCALE = weight("scale", "f32[1|C]", "positive")
_Q = value("y", "i8|u8[...,C]", "rounded")
_FLOAT = value("y", "f32[...,C]", "x on the grid of int8")
_ROUND = "clip(round_half_even({}), -128, 127)"
_ROW_SCALE = "scale = absmax(x) / 127 over the last axis, 1 where that is 0"

QUANTIZE = Op(
    "Quantize",
    (_X, _SCALE),
    (_Q,),
    (),
    f"y = {_ROUND.format('x / scale')}",
    "ONNX QuantizeLinear; Quamba, arXiv 2410.13229, equation 3, rounding instead of truncating",
)

QUANTIZE_ROWS = Op(
    "QuantizeRows",
    (_X,),
    (_Q, value("scale", "f32[...,1]", "one a row, found now")),
    (),
    f"{_ROW_SCALE}\ny = {_ROUND.format('x / scale')}",
    "dynamic quantization, one scale a token: LLM.int8(), arXiv 2208.07339, section 3.1",
)

DEQUANTIZE = Op(
    "Dequantize",
    (value("x", "i8[...,C]", "made by LinearInt8Quantize"), _SCALE),
    (_FLOAT,),
    (),
    "y = scale · x",
    "ONNX DequantizeLinear",
)

FAKE_QUANTIZE = Op(
    "FakeQuantize",
    (_X, _SCALE),
    (_FLOAT,),
    (),
    f"y = scale · {_ROUND.format('x / scale')}",
    "Quantize, then Dequantize",
)

FAKE_QUANTIZE_ROWS = Op(
    "FakeQuantizeRows",
    (_X,),
    (_FLOAT,),
    (),
    f"{_ROW_SCALE}\ny = scale · {_ROUND.format('x / scale')}",
    "QuantizeRows, then scale · y",
)

_INT8_X = value("x", "i8|u8[...,K]", "activations")
_X_SCALE = weight("x_scale", "f32[1]", "of x; one, because the sum runs over channels")
_INT8_WEIGHT = (
    weight("weight", "i8[N,K]", "rows are outputs"),
    weight("weight_scale", "f32[1|N]", "of weight: one, or one a row"),
)
_PRODUCT = value("y", "f32[...,N]", "not rounded")
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
    (_INT8_X, _X_SCALE, *_INT8_WEIGHT, weight("y_scale", "f32[1|N]", "of y")),
    (value("y", "i8[...,N]", "rounded"),),
    (),
    f"y[n] = {_ROUND.format(f'{_SUM} / y_scale[n]')}; the sum is an exact integer",
    "LinearInt8, then Quantize; ONNX QLinearMatMul",
)

LINEAR_INT8_ROWS = Op(
    "LinearInt8Rows",
    (_INT8_X, value("x_scale", "f32[...,1]", "of x, one a row"), *_INT8_WEIGHT),
    (_PRODUCT,),
    (),
    f"y[n] = {_SUM}; the sum is an exact integer",
    "LLM.int8(), arXiv 2208.07339, section 3.1 (vector-wise quantization)",
)

LINEAR_INT4 = Op(
    "LinearInt4",
    (_INT8_X, _X_SCALE, *LINEAR_BITS.inputs[1:]),
    (_PRODUCT,),
    LINEAR_BITS.attributes,
    "w[n,k] = unpack(packed)[n,k] - 2^(bits-1)\n"
    "y[n] = x_scale · Σ_b scales[n,b] · Σ_{k in block b} x[k] · w[n,k]; the inner sums are exact "
    "integers; bits is 4",
    "Quamba2, arXiv 2503.22879 (W4A8); the layout of com.microsoft.MatMulNBits",
)

LINEAR_INT4_QUANTIZE = Op(
    "LinearInt4Quantize",
    (*LINEAR_INT4.inputs, weight("y_scale", "f32[1|N]", "of y")),
    LINEAR_INT8_QUANTIZE.outputs,
    LINEAR_INT4.attributes,
    "y = round of LinearInt4(x, x_scale, packed, scales) / y_scale, as Quantize rounds",
    "LinearInt4, then Quantize",
)

_NORM_SCALE = weight("scale", "f32[1|D]", "of y")
_NORMED = value("y", "i8|u8[...,D]", "normed, then rounded")
_NORM_ROUND = _ROUND.format("weight · {0} / sqrt(mean({0}²) + eps) / scale")

RMS_NORM_QUANTIZE = Op(
    "RMSNormQuantize",
    (*RMS_NORM.inputs, _NORM_SCALE),
    (_NORMED,),
    RMS_NORM.attributes,
    f"y = {_NORM_ROUND.format('x')}",
    "RMSNorm, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)

ADD_RMS_NORM_QUANTIZE = Op(
    "AddRMSNormQuantize",
    (*ADD_RMS_NORM.inputs, _NORM_SCALE),
    (_NORMED, ADD_RMS_NORM.outputs[1]),
    ADD_RMS_NORM.attributes,
    f"sum = x + added\ny = {_NORM_ROUND.format('sum')}",
    "AddRMSNorm, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)

GATED_RMS_NORM_INT8 = Op(
    "GatedRMSNormInt8",
    (
        GATED_RMS_NORM.inputs[0],
        value("z", "i8[T,B,D]", "gate"),
        weight("z_scale", "f32[1|D]", "of z"),
        GATED_RMS_NORM.inputs[2],
    ),
    GATED_RMS_NORM.outputs,
    GATED_RMS_NORM.attributes,
    "gate = z_scale · z\ng = x · gate · sigmoid(gate)\ny = weight · g / sqrt(mean_group(g²) + eps)",
    "Dequantize of the gate, then GatedRMSNorm",
)

_ROTATED = (
    value("x", "f32[...,n]", "n = p·q"),
    weight("slow", "f32[p,p]", "orthonormal"),
    weight("fast", "f32[q,q]", "orthonormal"),
)
_ROTATION = "X = reshape(x, [p, q])\nr = reshape(slow · X · fast, [n])"

HADAMARD = Op(
    "Hadamard",
    _ROTATED,
    (value("y", "f32[...,n]", "rotated; y·y = x·x"),),
    (),
    f"{_ROTATION}\ny = r = (slow ⊗ fastᵀ) · x",
    "Quamba, arXiv 2410.13229, section 4.2; QuaRot, arXiv 2404.00456, section 3",
)

HADAMARD_QUANTIZE = Op(
    "HadamardQuantize",
    (*_ROTATED, weight("scale", "f32[1|n]", "of y")),
    (value("y", "i8|u8[...,n]", "rotated, then rounded"),),
    (),
    f"{_ROTATION}\ny = {_ROUND.format('r / scale')}",
    "Hadamard, then Quantize: Quamba, arXiv 2410.13229, section 4.3",
)

EMBED_INT8 = Op(
    "EmbedInt8",
    (
        value("tokens", "i64[T,B]", "token ids in [0, V)"),
        weight("table", "i8[V,D]", "one row a token; may be a tied head's weight"),
        weight("scale", "f32[1|V]", "of table: one, or one a row"),
    ),
    (value("y", "f32[T,B,D]", "the rows, dequantized"),),
    (),
    "v = tokens[t,b]\ny[t,b] = scale[v] · table[v]",
    "ONNX Gather, then DequantizeLinear",
)

ALL: tuple[Op, ...] = (
    QUANTIZE,
    QUANTIZE_ROWS,
    DEQUANTIZE,
    FAKE_QUANTIZE,
    FAKE_QUANTIZE_ROWS,
    LINEAR_INT8,
    LINEAR_INT8_QUANTIZE,
    LINEAR_INT8_ROWS,
    LINEAR_INT4,
    LINEAR_INT4_QUANTIZE,
    RMS_NORM_QUANTIZE,
    ADD_RMS_NORM_QUANTIZE,
    GATED_RMS_NORM_INT8,
    HADAMARD,
    HADAMARD_QUANTIZE,
    EMBED_INT8,
)
