"""Statements of Mamba-2's selective scan, of floats and of int8 values.

See `edge.plugins.selective_scan.statement` for chains, trees, kept rows and states in fewer bits.

Logged tokens: the scans accept the inputs of tokens before the run that `ssm_state` does not
include yet. They form a chain, are the first tokens of every path, and have no output except their
state. A run that verifies a draft then stores no states: the next run gets the accepted tokens as
logged ones ("multi-step", The Mamba in the Llama, arXiv 2408.15237, algorithm 2).
"""

from edge.ops import Attribute, Op, index, state, value, weight
from edge.plugins.quantize.statement import constant, scaled
from edge.plugins.selective_scan.statement import STATE_BITS, STATE_MATHS, STEERING

LOGGED = "the L logged tokens are t = -L … -1: x[t] = x_log[L+t], dt and B likewise\n"

SELECTIVE_SCAN_HEADS = Op(
    "SelectiveScanHeads",
    (
        value("x", "f32[T,B,H·P]", "output of the convolution"),
        value("dt", "f32[T,B,H]", "step size before bias and softplus"),
        value("B", "f32[T,B,G·N]", "input matrix, shared by the H/G heads of a group"),
        value("C", "f32[T,B,G·N]", "output matrix, shared likewise"),
        weight("A", "f32[H]", "-exp(A_log)"),
        weight("D", "f32[H]", "skip"),
        weight("dt_bias", "f32[H]", ""),
        state("ssm_state", "f32[B,H,P,N]", "state before the logged tokens and this run"),
        index("kept", "i64[R]", "tokens whose state is output, logged ones counted first: "
              "ascending, in [0, M), M = L + T"),
        index("ancestors", "f32[M,M]", "[t,j] is 1 when j is t or on t's path, else 0; of logged "
              "tokens too, which come first"),
        value("x_log", "f32[L,B,H·P]", "x of the logged tokens, oldest first"),
        value("dt_log", "f32[L,B,H]", "their dt"),
        value("B_log", "f32[L,B,G·N]", "their B"),
    ),
    (
        value("y", "f32[T,B,H·P]", "output of the run's own tokens, not yet gated"),
        state("ssm_states", "f32[R,B,H,P,N]", "state after each kept token"),
    ),
    (
        Attribute("heads", "int", "H"),
        Attribute("head_dim", "int", "P"),
        Attribute("groups", "int", "G", (None, 1)),
        Attribute("d_state", "int", "N"),
        Attribute("dt_min", "float", "Δ is clamped to [dt_min, dt_max]"),
        Attribute("dt_max", "float", "may be infinite"),
    ),
    f"{LOGGED}Δ = clamp(softplus(dt + dt_bias), dt_min, dt_max)\n"
    "h[t] = exp(Δ[t]·A) · h[parent(t)] + Δ[t]·x[t] ⊗ B[t]\ny[t] = h[t]·C[t] + D·x[t]\n"
    "ssm_states[r] = h[kept[r]-L]\nwith parent(t) the largest other j with ancestors[t,j] = 1; the "
    "quadratic form needs no parent: S = ancestors·(Δ·A), h[t] = exp(S[t])·h0 + "
    "Σ_j ancestors[t,j]·exp(S[t]-S[j])·Δ[j]·x[j]⊗B[j]",
    "Mamba-2, arXiv 2405.21060, equation 1, sections 3.2 and 6 (SSD)",
)  # fmt: skip

SELECTIVE_SCAN_HEADS_INT8 = Op(
    "SelectiveScanHeadsInt8",
    (
        *scaled("x", "H·P", "output of the convolution"),
        *scaled("dt", "H", "step size before bias and softplus"),
        *scaled("B", "G·N", "input matrix, shared by the H/G heads of a group"),
        *scaled("C", "G·N", "output matrix, shared likewise"),
        *constant("A_log", "H", "1", "A = -exp(A_log_scale·A_log)"),
        *constant("D", "H", "1", "skip"),
        *constant("dt_bias", "H", "1", ""),
        state("ssm_state", "f32|f16|i8[B,H,P,N]", "state before this run"),
        weight("state_scale", "f32[...]", "[1] or [H,1,N]; used when state_bits is 8"),
        *STEERING,
        index("ancestors", "f32[M,M]", "the same tree as `parents`, used when state_bits "
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
    (*SELECTIVE_SCAN_HEADS.attributes, STATE_BITS),
    f"{LOGGED}x, dt, B, C, D, dt_bias: each q·scale\n"
    "Δ = clamp(softplus(dt + dt_bias), dt_min, dt_max)\n"
    "h[t] = exp(Δ[t]·A) · s[parents[t]] + Δ[t]·x[t] ⊗ B[t]\ny[t] = h[t]·C[t] + D·x[t]\n"
    f"s[t] is h[t] as kept: {STATE_MATHS}\nssm_states[r] = s[kept[r]-L]",
    "Quamba2, arXiv 2503.22879; Mamba-2, arXiv 2405.21060, equation 1",
)  # fmt: skip
