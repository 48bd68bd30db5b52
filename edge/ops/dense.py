"""Embedding, linear layers, norms and gates: the stateless ops."""

from __future__ import annotations

from edge.ops.spec import Attribute, Op, value, weight

_X = value("x", "f32[...,D]", "activations")
_EPS = Attribute("eps", "float", "added to the mean square (variance, for LayerNorm)")
_BITS = (
    Attribute("K", "int", "columns of the unpacked weight"),
    Attribute("N", "int", "rows of the unpacked weight"),
    Attribute("bits", "int", "8 or 4"),
    Attribute("block_size", "int", "columns that share a scale; divides K"),
)
_PACKED = weight(
    "packed",
    "u8[N,K/block_size,block_size·bits/8]",
    "unsigned quants with zero point 2^(bits-1); 4-bit: even columns in the low nibble",
)
_SCALES = weight("scales", "f32[N,K/block_size]", "one scale a block, of either sign")

EMBED = Op(
    "Embed",
    (
        value("tokens", "i64[T,B]", "token ids in [0, V)"),
        weight("table", "f32|f16[V,D]", "one row a token"),
    ),
    (value("y", "f32[T,B,D]", "the rows"),),
    (),
    "y[t,b] = table[tokens[t,b]]",
    "ONNX Gather",
)

EMBED_BITS = Op(
    "EmbedBits",
    (value("tokens", "i64[T,B]", "token ids in [0, N)"), _PACKED, _SCALES),
    (value("y", "f32[T,B,K]", "the rows, dequantized"),),
    _BITS,
    "n = tokens[t,b]\ny[t,b,k] = (unpack(packed)[n,k] - 2^(bits-1)) · scales[n, k // block_size]",
    "the layout of com.microsoft.MatMulNBits, so that a tied head shares the table",
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
    (value("x", "f32[...,K]", "activations"), _PACKED, _SCALES),
    (value("y", "f32[...,N]", "x · dequantized(packed)ᵀ"),),
    _BITS,
    "w[n,k] = (unpack(packed)[n,k] - 2^(bits-1)) · scales[n, k // block_size]\ny = x · wᵀ; an "
    "implementation may round x to f16, as Linear, or to int8 per row and block of 32 or "
    "block_size columns",
    "com.microsoft.MatMulNBits, accuracy_level 4",
)

RMS_NORM = Op(
    "RMSNorm",
    (_X, weight("weight", "f32[D]", "")),
    (value("y", "f32[...,D]", "normed"),),
    (_EPS,),
    "y = weight · x / sqrt(mean(x²) + eps)",
    "Root mean square layer normalization, arXiv 1910.07467, equation 4",
)

ADD_RMS_NORM = Op(
    "AddRMSNorm",
    (
        value("x", "f32[...,D]", "residual stream"),
        value("added", "f32[...,D]", "what the last mixer adds to it"),
        weight("weight", "f32[D]", ""),
    ),
    (value("y", "f32[...,D]", "normed sum"), value("sum", "f32[...,D]", "the new residual stream")),
    (_EPS,),
    "sum = x + added\ny = weight · sum / sqrt(mean(sum²) + eps)",
    "mamba_ssm/ops/triton/layer_norm.py (prenorm, residual in fp32)",
)

LAYER_NORM = Op(
    "LayerNorm",
    (_X, weight("weight", "f32[D]", ""), weight("bias", "f32[D]", "")),
    (value("y", "f32[...,D]", "normed"),),
    (_EPS,),
    "y = weight · (x - mean(x)) / sqrt(var(x) + eps) + bias",
    "Layer normalization, arXiv 1607.06450",
)

ADD_LAYER_NORM = Op(
    "AddLayerNorm",
    (*ADD_RMS_NORM.inputs, weight("bias", "f32[D]", "")),
    ADD_RMS_NORM.outputs,
    (_EPS,),
    "sum = x + added\ny = weight · (sum - mean(sum)) / sqrt(var(sum) + eps) + bias",
    "mamba_ssm/ops/triton/layer_norm.py (prenorm, residual in fp32)",
)

GATED_RMS_NORM = Op(
    "GatedRMSNorm",
    (
        value("x", "f32[T,B,D]", "output of the scan"),
        value("z", "f32[T,B,D]", "gate"),
        weight("weight", "f32[D]", ""),
    ),
    (value("y", "f32[T,B,D]", "normed"),),
    (_EPS, Attribute("groups", "int", "the mean square is over D/groups values")),
    "g = x · z · sigmoid(z)\ny = weight · g / sqrt(mean_group(g²) + eps)",
    "Mamba-2, arXiv 2405.21060, section 7.1; mamba_ssm layernorm_gated, norm_before_gate=False",
)

SILU_GATE = Op(
    "SiluGate",
    (value("x", "f32[...,D]", "gated"), value("z", "f32[...,D]", "gate")),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x · z · sigmoid(z)",
    "GLU variants, arXiv 2002.05202, equation 5 (SwiGLU)",
)

GELU = Op(
    "Gelu",
    (_X,),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x/2 · (1 + erf(x/√2))",
    "Gaussian error linear units, arXiv 1606.08415, section 2",
)

GELU_TANH = Op(
    "GeluTanh",
    (_X,),
    (value("y", "f32[...,D]", ""),),
    (),
    "y = x/2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))",
    "Gaussian error linear units, arXiv 1606.08415, section 2: the approximation",
)

ALL = (
    EMBED,
    EMBED_BITS,
    LINEAR,
    LINEAR_BITS,
    RMS_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    ADD_LAYER_NORM,
    GATED_RMS_NORM,
    SILU_GATE,
    GELU,
    GELU_TANH,
)
