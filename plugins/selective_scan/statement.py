"""Statements of Mamba-1's selective scan, of floats and of int8 values.

The following applies to every op with a state of fixed size.

The T tokens of a run are a chain or a tree. A chain is the tree in which every token's parent is
the token before it. The path of a token is the committed state, then the token's ancestors in this
run, then the token itself. T is any length, and a run of T tokens is equivalent to T runs of one.

Kept rows: `kept` lists the tokens whose state is wanted. The states of others are never stored, so
prefill keeps one and a run that can be rewound keeps all.

The ops on int8 values are defined like the float ops, with q·scale in place of floats. All sums are
fp32. `round8(v) = clip(round_half_even(v), -128, 127)`. Scales are fp32 and positive, one for all
values or one per channel of the last axis ([1|C]).

A state may be stored in 16 or 8 bits. It is then rounded after every token, in runs of one or many
tokens, chains or trees, so a run of T tokens is still equivalent to T runs of one. A token's output
is read from its state before rounding, which is free and avoids one rounding error.

Bodies for ONNX Runtime only (the flavour `ort`) hold x, B and C of the scans and the convolution's
y as u8 with zero point 128: the same numbers, which it multiplies faster.
"""

from __future__ import annotations

from dataclasses import replace

from edge.ops import Attribute, Op, index, state, value, weight
from edge.plugins.quantize.statement import constant, scaled

SELECTIVE_SCAN = Op(
    "SelectiveScan",
    (
        value("x", "f32[T,B,E]", "output of the convolution"),
        value("dt", "f32[T,B,E]", "step size before bias and softplus"),
        value("B", "f32[T,B,N]", "input matrix"),
        value("C", "f32[T,B,N]", "output matrix"),
        value("z", "f32[T,B,E]", "gate"),
        weight("A", "f32[N,E]", "-exp(A_log)ᵀ"),
        weight("D", "f32[E]", "skip"),
        weight("dt_bias", "f32[E]", ""),
        state("ssm_state", "f32[B,N,E]", "state before this run"),
        index("kept", "i64[R]", "tokens whose state is output: ascending, in [0, T)"),
        index("parents", "i64[T]", "each token's parent, an earlier token; -1 is ssm_state"),
        index("tree", "bool[]", "false: parents is [-1, 0, 1, …] and need not be read"),
        index("last_only", "bool[]", "true: tree is false and kept is [T-1]"),
    ),
    (
        value("y", "f32[T,B,E]", ""),
        state("ssm_states", "f32[R,B,N,E]", "state after each kept token"),
    ),
    (),
    "Δ = softplus(dt + dt_bias)\nh[t] = exp(Δ[t]·A) · h[parents[t]] + Δ[t]·x[t] · B[t]\n"
    "y[t] = (Σ_n C[t,n]·h[t,n] + D·x[t]) · z[t]·sigmoid(z[t])\nssm_states[r] = h[kept[r]]",
    "Mamba, arXiv 2312.00752, equations 2a, 2b and 4, algorithm 2",
)

# index inputs: the tokens whose state is kept, and the shape of the tree
STEERING = tuple(v for v in SELECTIVE_SCAN.inputs if v.role == "index")

STATE_BITS = Attribute("state_bits", "int", "32, 16 or 8: storage of ssm_state", (32, 16, 8))

STATE_MATHS = (
    "32: s = h. 16: s = f16(h), half to even. 8: s = round8(h / state_scale), and h of s is "
    "s·state_scale"
)

SELECTIVE_SCAN_INT8 = Op(
    "SelectiveScanInt8",
    (
        *scaled("x", "E", "output of the convolution"),
        *scaled("dt", "E", "step size before bias and softplus"),
        *scaled("B", "N", "input matrix"),
        *scaled("C", "N", "output matrix"),
        *scaled("z", "E", "gate"),
        *constant("A_log", "N,E", "1", "transposed; A = -exp(A_log_scale·A_log)"),
        *constant("D", "E", "1", "skip"),
        *constant("dt_bias", "E", "1", ""),
        state("ssm_state", "f32|f16|i8[B,N,E]", "state before this run"),
        weight("state_scale", "f32[...]", "[1] or [N,1]; used when state_bits is 8"),
        *STEERING,
    ),
    (
        value("y", "f32[T,B,E]", ""),
        state("ssm_states", "f32|f16|i8[R,B,N,E]", "state after each kept token"),
    ),
    (STATE_BITS,),
    "x, dt, B, C, z, D, dt_bias: each q·scale\n"
    "Δ = softplus(dt + dt_bias)\nh[t] = exp(Δ[t]·A) · s[parents[t]] + Δ[t]·x[t] · B[t]\n"
    "y[t] = (Σ_n C[t,n]·h[t,n] + D·x[t]) · z[t]·sigmoid(z[t])\n"
    f"s[t] is h[t] as kept: {STATE_MATHS}\nssm_states[r] = s[kept[r]]",
    "Quamba, arXiv 2410.13229, sections 4.2 and 4.3; Mamba, arXiv 2312.00752, algorithm 2",
)


def _of_groups(op: Op, name: str) -> Op:
    """Return the op with a B and a C per group of channels."""
    groups = {"B": "G·N", "B_scale": "1|G·N", "C": "H·N", "C_scale": "1|H·N"}
    inputs = (
        replace(v, shape=(*v.shape[:-1], groups[v.name])) if v.name in groups else v
        for v in op.inputs
    )
    maths = (
        f"{op.maths}\nE/G channels that lie together share a B, E/H of them a C; G divides H, and "
        "one of each is what SelectiveScan has"
    )
    source = f"{op.source}; groups: The Mamba in the Llama, arXiv 2408.15237, its code"
    return replace(op, name=name, inputs=tuple(inputs), maths=maths, source=source)


SELECTIVE_SCAN_GROUPS = _of_groups(SELECTIVE_SCAN, "SelectiveScanGroups")
SELECTIVE_SCAN_GROUPS_INT8 = _of_groups(SELECTIVE_SCAN_INT8, "SelectiveScanGroupsInt8")
