"""Mamba-2's selective scan, token by token: steps, chains and trees, and prefill of rounded states.

A program holds the states [BLOCK_P, N] of some channels of one head of one sequence in registers,
replays the logged tokens and then runs the new ones; intermediate states never reach memory
("multi-step": The Mamba in the Llama, arXiv 2408.15237, algorithm 2). The recurrence is that of
Mamba-2, arXiv 2405.21060, equation 1. y is read from h before h is rounded to its stored type.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import softplus
from edge.plugins.kernels.replay import (
    ADVANCE,
    PENDING,
    SOURCE,
    STORE,
    TARGET,
    factor,
    heads_block,
    kept,
    load_state,
    store_state,
)


@triton.jit
def clamped_step(dt, dt_bias, DT_MIN: tl.constexpr, DT_MAX: tl.constexpr):
    """Return Δ = clamp(softplus(dt + dt_bias), DT_MIN, DT_MAX); NaN stays NaN."""
    delta = softplus(dt + dt_bias)
    delta = tl.where(delta < DT_MIN, DT_MIN, delta)
    return tl.where(delta > DT_MAX, DT_MAX, delta)


@triton.jit
def update(h, x, delta, b, a):
    """Return exp(Δ·A)·h + Δ·x⊗B. h [BLOCK_P, BLOCK_N], x [BLOCK_P], b [BLOCK_N], scalar Δ and A."""
    return tl.fma(tl.exp(delta * a), h, (delta * x)[:, None] * b[None, :])


@triton.jit
def read_row(x, dt, B, row, at, ends, some, STRIDES: tl.constexpr):
    """Load one token's x, dt and B as stored: columns `at` below `ends`, none if some is 0.

    Masks are comparisons, because the interpreter does not support block & scalar.
    """
    x_row = tl.load(x + row * STRIDES[0] + at[0], mask=at[0] < ends[0] * some, other=0)
    dt_row = tl.load(dt + row * STRIDES[1] + at[1], mask=at[1] < ends[1] * some, other=0)
    b_row = tl.load(B + row * STRIDES[2] + at[2], mask=at[2] < ends[2] * some, other=0)
    return x_row, dt_row, b_row


@triton.jit
def advanced(h, token, factors, layer, LIMITS: tl.constexpr):
    """Return (h after a token, unrounded; its x in fp32). `layer`: A and dt_bias of the head."""
    x = token[0].to(tl.float32) * factors[0]
    b = token[2].to(tl.float32) * factors[2]
    dt = token[1].to(tl.float32) * factors[1]
    delta = clamped_step(dt, layer[1], LIMITS[0], LIMITS[1])
    return update(h, x, delta, b, layer[0]), x


@triton.jit
def replayed(
    h, logs, run, replay, targets, inside, state_factor, batch, sequence, at, ends, factors, layer,
    STRIDES: tl.constexpr, LIMITS: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Return h after the tokens in `replay`; if STORE is 1, store h after ADVANCE of them.

    Rows are read one token ahead and slots two ahead; otherwise each token would wait twice. At the
    end the last slot is read again: another program may write to any slot that is not pending.
    """
    pending = tl.load(run + PENDING)
    advance = tl.where(tl.load(run + STORE) == 1, tl.load(run + ADVANCE), 0)
    some = tl.minimum(pending, 1)
    row = tl.load(replay, mask=pending > 0, other=0) * batch + sequence
    ahead = read_row(logs[0], logs[1], logs[2], row, at, ends, some, STRIDES)
    slot = tl.load(replay + tl.minimum(1, pending - 1), mask=pending > 0, other=0)
    for j in range(pending):
        token = ahead
        row = slot * batch + sequence
        ahead = read_row(logs[0], logs[1], logs[2], row, at, ends, 1, STRIDES)
        slot = tl.load(replay + tl.minimum(j + 2, pending - 1))
        h, _ = advanced(h, token, factors, layer, LIMITS)
        h = kept(h, state_factor, kind)
        if j + 1 == advance:
            store_state(targets, h, inside, state_factor, kind)
    return h


@triton.jit
def stash(logs, token, row, at, there, SHARING: tl.constexpr, STRIDES: tl.constexpr):
    """Write a token to the logs: dt once per head, B once per SHARING heads, which share it."""
    tl.store(logs[0] + row * STRIDES[0] + at[0], token[0], mask=there[0])
    if tl.program_id(1) == 0:
        tl.store(logs[1] + row * STRIDES[1] + at[1], token[1])
        if at[1] % SHARING == 0:
            tl.store(logs[2] + row * STRIDES[2] + at[2], token[2], mask=there[1])


@triton.jit
def head_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, head, ROUNDED: tl.constexpr):
    """Load A, D and dt_bias of a head. If ROUNDED they are int8, and A = -exp(A_scale·A)."""
    a = tl.load(A + head).to(tl.float32)
    skip = tl.load(D + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    if ROUNDED:
        a = -tl.exp(a * tl.load(A_scale))
        skip = skip * tl.load(D_scale)
        bias = bias * tl.load(dt_bias_scale)
    return a, skip, bias


@triton.jit
def scan(
    x,  # f32 or i8 [T·B, X_STRIDE]; dt, B and C alike
    dt,
    B,
    C,
    A,  # f32 [HEADS], or i8: A = -exp(A_scale·A)
    D,  # f32 or i8 [HEADS]
    dt_bias,  # f32 or i8 [HEADS]
    x_scale,  # f32 [X_SCALES]: one, or one per channel; all scales are None if x is f32
    dt_scale,
    B_scale,
    C_scale,
    A_scale,  # f32 [1]
    D_scale,
    dt_bias_scale,
    state_scale,  # f32 [1] or [HEADS, 1, N], None unless the state is i8
    state,  # f32, f16 or i8 [2, batch, HEADS, P, N]
    log_x,  # type of x [S·B, HEADS·P]
    log_dt,  # type of dt [S·B, HEADS]
    log_B,  # type of B [S·B, GROUPS·N]
    y,  # f32 [T·B, HEADS·P]
    run,  # i32 [8]
    replay,  # i32 [S]
    slots,  # i32 [T]
    ancestors,  # i32 [T, T], read only if TREE
    tokens,  # T
    batch,  # B
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,  # 0 for f32
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    STATE_SCALES: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
    TREE: tl.constexpr,
):
    sequence = tl.program_id(2)
    block, slot_size, there, at, ends = heads_block(
        state, batch, HEADS, P, N, GROUPS, BLOCK_P, BLOCK_N
    )
    p_inside, n_inside = there
    inside = p_inside[:, None] & n_inside[None, :]
    head = at[1]
    kind: tl.constexpr = state.dtype.element_ty

    # the state first: everything else is small and arrives meanwhile
    state_factor = 1.0
    if kind == tl.int8:
        of_head = head * N + tl.arange(0, BLOCK_N)
        state_factor = factor(state_scale, of_head, n_inside, STATE_SCALES)
        if STATE_SCALES > 1:
            state_factor = state_factor[None, :]
    h = load_state(block + tl.load(run + SOURCE) * slot_size, inside, state_factor, kind)
    target = block + tl.load(run + TARGET) * slot_size
    limits: tl.constexpr = (DT_MIN, DT_MAX)
    logs = (log_x, log_dt, log_B)
    log_strides: tl.constexpr = (HEADS * P, HEADS, GROUPS * N)
    strides: tl.constexpr = (X_STRIDE, DT_STRIDE, B_STRIDE)
    factors = (
        factor(x_scale, at[0], p_inside, X_SCALES),
        factor(dt_scale, head, head < HEADS, DT_SCALES),
        factor(B_scale, at[2], n_inside, B_SCALES),
    )
    c_factor = factor(C_scale, at[2], n_inside, C_SCALES)
    a, skip, bias = head_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, head, X_SCALES > 0)
    layer = (a, bias)

    # Each token is read while the one before it is computed.
    some = tl.minimum(tokens, 1)
    ahead = read_row(x, dt, B, sequence, at, ends, some, strides)
    c_ahead = tl.load(C + sequence * C_STRIDE + at[2], mask=at[2] < ends[2] * some, other=0)
    h = replayed(
        h, logs, run, replay, target, inside, state_factor, batch,
        sequence, at, ends, factors, layer, log_strides, limits, kind,
    )  # fmt: skip
    start = h
    for t in range(tokens):
        if TREE:
            h = start
            for j in range(t):
                if tl.load(ancestors + t * tokens + j) != 0:
                    row = j * batch + sequence
                    token = read_row(x, dt, B, row, at, ends, 1, strides)
                    h, _ = advanced(h, token, factors, layer, limits)
                    h = kept(h, state_factor, kind)
        row = t * batch + sequence
        slot = tl.load(slots + t)
        token = ahead
        c = c_ahead.to(tl.float32) * c_factor
        following = tl.minimum(t + 1, tokens - 1) * batch + sequence
        ahead = read_row(x, dt, B, following, at, ends, 1, strides)
        c_ahead = tl.load(C + following * C_STRIDE + at[2], mask=n_inside, other=0)
        h, x_t = advanced(h, token, factors, layer, limits)
        out = tl.sum(h * c[None, :], 1) + skip * x_t
        tl.store(y + row * (HEADS * P) + at[0], out, mask=p_inside)
        h = kept(h, state_factor, kind)
        if slot >= 0:
            stash(logs, token, slot * batch + sequence, at, there, HEADS // GROUPS, log_strides)
    if not TREE and tl.load(run + STORE) == 2:
        store_state(target, h, inside, state_factor, kind)
