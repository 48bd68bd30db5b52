"""Causal convolution and selective scans: the ops whose state has a fixed size.

The T tokens of a run are a chain or a tree. A chain is the tree whose every token's parent is the
one before it. "Path" below means: the committed state, then the ancestors of a token in this run,
then the token itself. T is any length, and a run of T tokens means the same as T runs of one.

Kept rows: `kept` names the tokens after which the state is wanted. The states of the others are
never written anywhere, so prefill keeps one and a rewindable run keeps all.

Logged tokens: Mamba-2's scans may be given the inputs of tokens that came before the run and that
`ssm_state` does not hold yet. They are a chain, count as the first tokens of every path, and have
no output but their state. A run that is to be verified need then write no states: the next one
logs the tokens that stood ("multi-step", The Mamba in the Llama, arXiv 2408.15237, algorithm 2).
"""

from __future__ import annotations

from edge.ops.spec import Attribute, Op, index, state, value, weight

_KEPT = index("kept", "i64[R]", "tokens whose state is emitted: ascending, in [0, T)")

CAUSAL_CONV1D = Op(
    "CausalConv1d",
    (
        value("x", "f32[T,B,C]", "inputs"),
        state("conv_state", "f32[K-1,B,C]", "the K-1 inputs before this run, oldest first"),
        index(
            "taps", "i64[T,K]", "last K inputs on each token's path, oldest first, itself last: "
            "rows of concat(conv_state, x)",
        ),
        index("kept_taps", "i64[R,K-1]", "taps[kept, 1:]: the inputs that are the state after it"),
        weight("weight", "f32[K,1,C]", "tap k meets the k-th oldest input"),
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
        _KEPT,
        index("parents", "i64[T]", "each token's parent, below itself; -1 is ssm_state"),
        index("tree", "bool[]", "false: parents is [-1, 0, 1, …] and need not be looked at"),
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

# The inputs of logged tokens: name → what they are rows of.
LOGS = {"x_log": "x", "dt_log": "dt", "B_log": "B"}
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
        index("kept", "i64[R]", "tokens whose state is emitted, logged ones counted first: "
              "ascending, in [0, M), M = L + T"),
        index("ancestors", "f32[M,M]", "[t,j] is 1 when j is t or on t's path, else 0; of logged "
              "tokens too, which come first"),
        value("x_log", "f32[L,B,H·P]", "x of the logged tokens, oldest first"),
        value("dt_log", "f32[L,B,H]", "their dt"),
        value("B_log", "f32[L,B,G·N]", "their B"),
    ),
    (
        value("y", "f32[T,B,H·P]", "of the run's own tokens, not yet gated"),
        state("ssm_states", "f32[R,B,H,P,N]", "state after each kept token"),
    ),
    (
        Attribute("heads", "int", "H"),
        Attribute("head_dim", "int", "P"),
        Attribute("groups", "int", "G"),
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

ALL = (CAUSAL_CONV1D, SELECTIVE_SCAN, SELECTIVE_SCAN_HEADS)
