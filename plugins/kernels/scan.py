"""Mamba-1's selective scan, token by token: steps, chunks and trees of fp32 or int8 values.

A program holds the states [N, BLOCK_E] of some channels of one sequence in registers, replays the
tokens that its logs hold and then runs the new ones: no state in between reaches memory
("multi-step": The Mamba in the Llama, arXiv 2408.15237, algorithm 2). The recurrence is that of
Mamba, arXiv 2312.00752, algorithm 2. y is read from h before h is rounded to what is kept of it.
A token's inputs are read one token ahead: nothing in the loop but h waits for the token before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import silu, softplus
from edge.plugins.kernels.replay import (
    ADVANCE,
    PENDING,
    SOURCE,
    STORE,
    TARGET,
    factor,
    kept,
    load_state,
    store_state,
)


@triton.jit
def update(h, x, dt, B, rate):
    """h after one more token, not yet rounded: exp(Δ·A)·h + Δ·x·B with Δ = softplus(dt).

    h [BLOCK_N, BLOCK_E]; x, dt [BLOCK_E]; B [BLOCK_N]; rate is A·log2(e), as GPUs have exp2.
    """
    delta = softplus(dt)
    fed = (delta * x)[None, :] * B[:, None]
    return tl.fma(tl.exp2(delta[None, :] * rate), h, fed)


@triton.jit
def output(h, x, C, D, z):
    """(C·h + D·x)·silu(z), one a channel."""
    return (tl.sum(h * C[:, None], 0) + D * x) * silu(z)


@triton.jit
def scan(
    x,  # f32, f16 or i8 [T·B, X_STRIDE]; likewise dt, B, C and z
    dt,
    B,
    C,
    z,
    A,  # f32 [N, E], or i8: A_log, A = -exp(A_scale·A_log)
    D,  # f32 or i8 [E]
    dt_bias,  # f32 or i8 [E]
    x_scale,  # f32 [X_SCALES]: 1, or one a channel; all scales are None of floats
    dt_scale,
    B_scale,
    C_scale,
    z_scale,
    A_scale,  # f32 [1]
    D_scale,
    dt_bias_scale,
    state_scale,  # f32 [1] or [N, 1], None unless the state is i8
    state,  # f32, f16 or i8 [2, batch, N, E]
    log_x,  # as x [S·B, E]
    log_dt,  # as dt [S·B, E]
    log_B,  # as B [S·B, N]
    y,  # f32 [T·B, E]
    run,  # i32 [8]
    replay,  # i32 [S]
    slots,  # i32 [T]
    ancestors,  # i32 [T, T], None of chains
    tokens,  # T
    batch,  # B
    E: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,  # 0 of floats
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    Z_SCALES: tl.constexpr,
    STATE_SCALES: tl.constexpr,
):
    sequence = tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    in_e = e < E
    in_n = n < N
    inside = in_n[:, None] & in_e[None, :]
    kind: tl.constexpr = state.dtype.element_ty

    # the state first: everything else is small and comes while it is on its way
    size = batch.to(tl.int64) * (N * E)
    # Nothing is said of contiguity, so that a load gives a thread one channel and all its N: then
    # the sum over N stays in a thread. Loads of 16 bytes a thread would spread it over a warp.
    each = tl.max_contiguous(n[:, None] * E + e[None, :], [1, 1])
    states = state + sequence * (N * E) + each
    unit = 1.0
    if STATE_SCALES > 0:
        unit = factor(state_scale, n[:, None], in_n[:, None], STATE_SCALES)
    h = load_state(states + tl.load(run + SOURCE) * size, inside, unit, kind)
    targets = states + tl.load(run + TARGET) * size
    store = tl.load(run + STORE)

    rate = tl.load(A + each, mask=inside, other=0).to(tl.float32)
    skip = tl.load(D + e, mask=in_e, other=0).to(tl.float32)
    offset = tl.load(dt_bias + e, mask=in_e, other=0).to(tl.float32)
    if A_scale is not None:
        rate = -tl.exp(rate * tl.load(A_scale))
        skip = skip * tl.load(D_scale)
        offset = offset * tl.load(dt_bias_scale)
    rate = rate * 1.4426950408889634
    x_unit = factor(x_scale, e, in_e, X_SCALES)
    dt_unit = factor(dt_scale, e, in_e, DT_SCALES)
    B_unit = factor(B_scale, n, in_n, B_SCALES)
    C_unit = factor(C_scale, n, in_n, C_SCALES)
    z_unit = factor(z_scale, e, in_e, Z_SCALES)

    pending = tl.load(run + PENDING)
    if pending > 0:
        advance = tl.load(run + ADVANCE)
        row = tl.load(replay) * batch + sequence
        x_next = tl.load(log_x + row * E + e, mask=in_e, other=0)
        dt_next = tl.load(log_dt + row * E + e, mask=in_e, other=0)
        B_next = tl.load(log_B + row * N + n, mask=in_n, other=0)
        for j in range(pending):
            x_now = x_next.to(tl.float32) * x_unit
            dt_now = dt_next.to(tl.float32) * dt_unit + offset
            B_now = B_next.to(tl.float32) * B_unit
            row = tl.load(replay + tl.minimum(j + 1, pending - 1)) * batch + sequence
            x_next = tl.load(log_x + row * E + e, mask=in_e, other=0)
            dt_next = tl.load(log_dt + row * E + e, mask=in_e, other=0)
            B_next = tl.load(log_B + row * N + n, mask=in_n, other=0)
            h = kept(update(h, x_now, dt_now, B_now, rate), unit, kind)
            if (store == 1) & (j + 1 == advance):
                store_state(targets, h, inside, unit, kind)

    if tokens > 0:
        x_next = tl.load(x + sequence * X_STRIDE + e, mask=in_e, other=0)
        dt_next = tl.load(dt + sequence * DT_STRIDE + e, mask=in_e, other=0)
        B_next = tl.load(B + sequence * B_STRIDE + n, mask=in_n, other=0)
        C_next = tl.load(C + sequence * C_STRIDE + n, mask=in_n, other=0)
        z_next = tl.load(z + sequence * Z_STRIDE + e, mask=in_e, other=0)
        for t in range(tokens):
            slot = tl.load(slots + t)
            if slot >= 0:
                row = slot * batch + sequence
                tl.store(log_x + row * E + e, x_next, mask=in_e)
                tl.store(log_dt + row * E + e, dt_next, mask=in_e)
                # every program of the sequence writes the same
                tl.store(log_B + row * N + n, B_next, mask=in_n)
            x_now = x_next.to(tl.float32) * x_unit
            dt_now = dt_next.to(tl.float32) * dt_unit + offset
            B_now = B_next.to(tl.float32) * B_unit
            C_now = C_next.to(tl.float32) * C_unit
            z_now = z_next.to(tl.float32) * z_unit
            row = tl.minimum(t + 1, tokens - 1) * batch + sequence
            x_next = tl.load(x + row * X_STRIDE + e, mask=in_e, other=0)
            dt_next = tl.load(dt + row * DT_STRIDE + e, mask=in_e, other=0)
            B_next = tl.load(B + row * B_STRIDE + n, mask=in_n, other=0)
            C_next = tl.load(C + row * C_STRIDE + n, mask=in_n, other=0)
            z_next = tl.load(z + row * Z_STRIDE + e, mask=in_e, other=0)
            h = update(h, x_now, dt_now, B_now, rate)
            here = (t * batch + sequence) * E + e
            tl.store(y + here, output(h, x_now, C_now, skip, z_now), mask=in_e)
            h = kept(h, unit, kind)
    if store == 2:
        store_state(targets, h, inside, unit, kind)
