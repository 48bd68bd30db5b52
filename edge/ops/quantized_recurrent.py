"""Causal convolution and selective scans on int8 values.

They mean what `edge.ops.recurrent` says of the floating ops, on values q·scale in place of floats;
chains, trees, paths and kept rows are as there. All sums are fp32. `round8(v) =
clip(round_half_even(v), -128, 127)`. A scale is fp32, positive, and one for all values or one a
channel of the last axis ([1|C]).

A state may be kept in 16 or 8 bits. It is then rounded after every token, whether a run has one
token or many and whether they are a chain or a tree, so that a run of T tokens still means T runs
of one. A token's output is read from its own state before it is rounded, which costs nothing and
spares it one rounding error.

Bodies made for ONNX Runtime alone (the flavour `ort`) hold x, B and C of the scans and the
convolution's y as u8 with zero point 128: the same numbers, of which it multiplies faster.
"""

from __future__ import annotations

from edge.ops.recurrent import CAUSAL_CONV1D, LOGGED, SELECTIVE_SCAN, SELECTIVE_SCAN_HEADS
from edge.ops.spec import Attribute, Op, Value, index, state, value, weight

_FLOAT_INPUTS = {v.name: v for op in (SELECTIVE_SCAN, CAUSAL_CONV1D) for v in op.inputs}
_STATE_BITS = Attribute("state_bits", "int", "32, 16 or 8: how ssm_state is kept")
_STATE_MATHS = (
    "32: s = h. 16: s = f16(h), half to even. 8: s = round8(h / state_scale), and h of s is "
    "s·state_scale"
)


def _scaled(name: str, channels: str, doc: str) -> tuple[Value, Value]:
    """An activation [T,B,channels] in int8, and its scale."""
    return (
        value(name, f"i8[T,B,{channels}]", doc),
        weight(f"{name}_scale", f"f32[1|{channels}]", f"one {name} is q·{name}_scale"),
    )


def _constant(name: str, shape: str, scale: str, doc: str) -> tuple[Value, Value]:
    """A weight in int8, and its scale."""
    return (
        weight(name, f"i8[{shape}]", doc),
        weight(f"{name}_scale", f"f32[{scale}]", ""),
    )


CAUSAL_CONV1D_INT8 = Op(
    "CausalConv1dInt8",
    (
        *_scaled("x", "C", "inputs"),
        state("conv_state", "i8[K-1,B,C]", "the K-1 inputs before this run, oldest first"),
        _FLOAT_INPUTS["taps"],
        _FLOAT_INPUTS["kept_taps"],
        *_constant("weight", "K,1,C", "1|C", "tap k meets the k-th oldest input"),
        *_constant("bias", "C", "1|C", "zeros when the model has none"),
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

SELECTIVE_SCAN_INT8 = Op(
    "SelectiveScanInt8",
    (
        *_scaled("x", "E", "output of the convolution"),
        *_scaled("dt", "E", "step size before bias and softplus"),
        *_scaled("B", "N", "input matrix"),
        *_scaled("C", "N", "output matrix"),
        *_scaled("z", "E", "gate"),
        *_constant("A_log", "N,E", "1", "transposed; A = -exp(A_log_scale·A_log)"),
        *_constant("D", "E", "1", "skip"),
        *_constant("dt_bias", "E", "1", ""),
        state("ssm_state", "f32|f16|i8[B,N,E]", "state before this run"),
        weight("state_scale", "f32[...]", "[1] or [N,1]; looked at when state_bits is 8"),
        *(_FLOAT_INPUTS[name] for name in ("kept", "parents", "tree", "last_only")),
    ),
    (
        value("y", "f32[T,B,E]", ""),
        state("ssm_states", "f32|f16|i8[R,B,N,E]", "state after each kept token"),
    ),
    (_STATE_BITS,),
    "x, dt, B, C, z, D, dt_bias: each q·scale\n"
    "Δ = softplus(dt + dt_bias)\nh[t] = exp(Δ[t]·A) · s[parents[t]] + Δ[t]·x[t] · B[t]\n"
    "y[t] = (Σ_n C[t,n]·h[t,n] + D·x[t]) · z[t]·sigmoid(z[t])\n"
    f"s[t] is h[t] as kept: {_STATE_MATHS}\nssm_states[r] = s[kept[r]]",
    "Quamba, arXiv 2410.13229, sections 4.2 and 4.3; Mamba, arXiv 2312.00752, algorithm 2",
)

SELECTIVE_SCAN_HEADS_INT8 = Op(
    "SelectiveScanHeadsInt8",
    (
        *_scaled("x", "H·P", "output of the convolution"),
        *_scaled("dt", "H", "step size before bias and softplus"),
        *_scaled("B", "G·N", "input matrix, shared by the H/G heads of a group"),
        *_scaled("C", "G·N", "output matrix, shared likewise"),
        *_constant("A_log", "H", "1", "A = -exp(A_log_scale·A_log)"),
        *_constant("D", "H", "1", "skip"),
        *_constant("dt_bias", "H", "1", ""),
        state("ssm_state", "f32|f16|i8[B,H,P,N]", "state before this run"),
        weight("state_scale", "f32[...]", "[1] or [H,1,N]; looked at when state_bits is 8"),
        *(_FLOAT_INPUTS[name] for name in ("kept", "parents", "tree", "last_only")),
        index("ancestors", "f32[M,M]", "the same tree as `parents`, looked at when state_bits "
              "is 32: [t,j] is 1 when j is t or on t's path, else 0; of logged tokens too, which "
              "come first and which `kept` counts first. There are none when state_bits is not 32"),
        value("x_log", "i8[L,B,H·P]", "x of the logged tokens, oldest first"),
        value("dt_log", "i8[L,B,H]", "their dt"),
        value("B_log", "i8[L,B,G·N]", "their B"),
    ),
    (
        value("y", "f32[T,B,H·P]", "not yet gated"),
        state("ssm_states", "f32|f16|i8[R,B,H,P,N]", "state after each kept token"),
    ),
    (*SELECTIVE_SCAN_HEADS.attributes, _STATE_BITS),
    f"{LOGGED}x, dt, B, C, D, dt_bias: each q·scale\n"
    "Δ = clamp(softplus(dt + dt_bias), dt_min, dt_max)\n"
    "h[t] = exp(Δ[t]·A) · s[parents[t]] + Δ[t]·x[t] ⊗ B[t]\ny[t] = h[t]·C[t] + D·x[t]\n"
    f"s[t] is h[t] as kept: {_STATE_MATHS}\nssm_states[r] = s[kept[r]-L]",
    "Quamba2, arXiv 2503.22879; Mamba-2, arXiv 2405.21060, equation 1",
)  # fmt: skip

ALL: tuple[Op, ...] = (CAUSAL_CONV1D_INT8, SELECTIVE_SCAN_INT8, SELECTIVE_SCAN_HEADS_INT8)
