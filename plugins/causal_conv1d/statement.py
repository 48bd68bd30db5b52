"""Statements of the causal convolution, of floats and of int8 values.

See `edge.plugins.selective_scan.statement` for chains, trees, paths and kept rows.
"""

from dataclasses import replace

from edge.ops import Op, index, state, value, weight
from edge.plugins.quantize.statement import constant, scaled

CAUSAL_CONV1D = Op(
    "CausalConv1d",
    (
        value("x", "f32[T,B,C]", "inputs"),
        state("conv_state", "f32[K-1,B,C]", "the K-1 inputs before this run, oldest first"),
        index(
            "taps", "i64[T,K]", "last K inputs on each token's path, oldest first, itself last: "
            "rows of concat(conv_state, x)",
        ),
        index("kept_taps", "i64[R,K-1]", "taps[kept, 1:]: the state after each kept token"),
        weight("weight", "f32[K,1,C]", "tap k multiplies the k-th oldest input"),
        weight("bias", "f32[C]", "zeros when the model has none"),
    ),
    (
        value("y", "f32[T,B,C]", ""),
        state("conv_states", "f32[R,K-1,B,C]", "the last K-1 inputs after each kept token"),
    ),
    (),
    "i = concat(conv_state, x)\ny[t] = silu(Σ_k weight[k] · i[taps[t,k]] + bias)\n"
    "conv_states[r] = i[kept_taps[r]]",
    "causal-conv1d, causal_conv1d_ref; Mamba, arXiv 2312.00752, figure 3",
)  # fmt: skip

CAUSAL_CONV_PLAIN = replace(
    CAUSAL_CONV1D,
    name="CausalConvPlain",
    maths="i = concat(conv_state, x)\ny[t] = Σ_k weight[k] · i[taps[t,k]] + bias\n"
    "conv_states[r] = i[kept_taps[r]]",
    source="CausalConv1d, without SiLU",
)

CAUSAL_CONV1D_INT8 = Op(
    "CausalConv1dInt8",
    (
        *scaled("x", "C", "inputs"),
        state("conv_state", "i8[K-1,B,C]", "the K-1 inputs before this run, oldest first"),
        *CAUSAL_CONV1D.only("taps", "kept_taps"),
        *constant("weight", "K,1,C", "1|C", "tap k multiplies the k-th oldest input"),
        *constant("bias", "C", "1|C", "zeros when the model has none"),
        weight("y_scale", "f32[1|C]", ""),
    ),
    (
        value("y", "i8[T,B,C]", ""),
        state("conv_states", "i8[R,K-1,B,C]", "the last K-1 inputs after each kept token"),
    ),
    (),
    "i = concat(conv_state, x)\n"
    "v[t] = Σ_k weight_scale·weight[k] · x_scale·i[taps[t,k]] + bias_scale·bias\n"
    "y[t] = round8(silu(v[t]) / y_scale)\nconv_states[r] = i[kept_taps[r]]",
    "Quamba, arXiv 2410.13229, section 4.3 (fused convolution, SiLU and quantization)",
)
