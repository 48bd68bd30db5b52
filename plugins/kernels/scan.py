"""Mamba-1's selective scan, token by token: steps, chunks and trees of fp32 or int8 values.

A program holds the states [N, BLOCK_E] of some channels of one sequence in registers, replays the
tokens that its logs hold and then runs the new ones: no state in between reaches memory
("multi-step": The Mamba in the Llama, arXiv 2408.15237, algorithm 2). The recurrence is that of
Mamba, arXiv 2312.00752, algorithm 2. y is read from h before h is rounded to what is kept of it.
A token's inputs are read one token ahead: nothing in the loop but h waits for the token before.

h is counted in steps of the kept state: what scales there are go into what is fed to it and what
is read from it, and rounding an int8 state needs no division.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import silu, softplus
from edge.plugins.kernels.linear import few_float
from edge.plugins.kernels.linear_int8 import few_int8, scaled
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
def read(x, dt, B, row, X_STRIDE, DT_STRIDE: tl.constexpr, B_STRIDE, at):
    """A token of the scan as it is stored: x, dt [BLOCK_E], B [BLOCK_N].

    DT_STRIDE 0: dt [ROWS, BLOCK_E] holds the values of all rows of the run.
    """
    e, in_e, n, in_n = at
    if DT_STRIDE == 0:
        rows = tl.arange(0, dt.shape[0])
        own_dt = tl.sum(tl.where(rows[:, None] == row, dt, 0), 0)
    else:
        own_dt = tl.load(dt + row * DT_STRIDE + e, mask=in_e, other=0)
    return (
        tl.load(x + row * X_STRIDE + e, mask=in_e, other=0),
        own_dt,
        tl.load(B + row * B_STRIDE + n, mask=in_n, other=0),
    )


@triton.jit
def stash(log_x, log_dt, log_B, row, token, at, E, N):
    """Keep a token; every program of a sequence writes the same B."""
    e, in_e, n, in_n = at
    tl.store(log_x + row * E + e, token[0], mask=in_e)
    tl.store(log_dt + row * E + e, token[1], mask=in_e)
    tl.store(log_B + row * N + n, token[2], mask=in_n)


@triton.jit
def update(h, token, rate, units):
    """h [BLOCK_N, BLOCK_E] after one more token, not yet rounded.

    exp(Δ·A)·h + Δ·x·B with Δ = softplus(dt + bias); rate is A·log2(e), because GPUs have exp2.
    """
    x, dt, B = token
    x_unit, dt_unit, dt_bias, B_unit = units
    delta = softplus(dt.to(tl.float32) * dt_unit + dt_bias)
    fed = delta * (x.to(tl.float32) * x_unit)
    decay = tl.exp2(delta[None, :] * rate)
    return tl.fma(decay, h, fed[None, :] * (B.to(tl.float32) * B_unit)[:, None])


@triton.jit
def output(h, x, C, z, units):
    """(C·h + D·x)·silu(z), one a channel."""
    C_unit, C_gain, D, z_unit = units
    y = tl.sum(h * (C.to(tl.float32) * C_unit)[:, None], 0) * C_gain
    return (y + x.to(tl.float32) * D) * silu(z.to(tl.float32) * z_unit)


@triton.jit
def widen(
    B,  # i8 [T·B, B_STRIDE]
    C,  # i8 [T·B, C_STRIDE]
    wide,  # f32 [T·B, 2·N]: B, then C
    rows,  # T·B
    N: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    inside = (m < rows) & (n < N)
    tl.store(wide + m * (2 * N) + n, tl.load(B + m * B_STRIDE + n, inside), inside)
    tl.store(wide + m * (2 * N) + N + n, tl.load(C + m * C_STRIDE + n, inside), inside)


@triton.jit
def scan(
    x,  # f32, f16 or i8 [T·B, X_STRIDE]; likewise dt, B, C and z; B and C may come from `widen`
    dt,  # None where it is low_dt · dt_weight
    B,
    C,
    z,
    low_dt,  # f32 or i8 [T·B, LOW_STRIDE], T·B at most ROWS; likewise all of these
    low_dt_scale,  # f32 [1]
    dt_weight,  # f32, f16 or i8 [E, RANK]
    dt_weight_scale,  # f32 [1] or [E]
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
    log_B,  # as B, before it was widened [S·B, N]
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
    DT_WEIGHT_SCALES: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    RANK: tl.constexpr,  # columns of low_dt
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16
):
    sequence = tl.program_id(1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    in_e, in_n = e < E, n < N
    at = (e, in_e, n, in_n)
    inside = in_n[:, None] & in_e[None, :]
    kind: tl.constexpr = state.dtype.element_ty

    # Nothing is said of contiguity, so that a load gives a thread one channel and all its N: then
    # the sum over N stays in a thread. Loads of 16 bytes a thread would spread it over a warp.
    each = tl.max_contiguous(n[:, None] * E + e[None, :], [1, 1])
    # the state first: everything else is small and comes while it is on its way
    size = batch.to(tl.int64) * (N * E)
    states = state + sequence * (N * E) + each
    h = load_state(states + tl.load(run + SOURCE) * size, inside, 1.0, kind)
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
    B_unit = factor(B_scale, n, in_n, B_SCALES)
    C_unit = factor(C_scale, n, in_n, C_SCALES)
    if STATE_SCALES > 0:
        state_unit = factor(state_scale, n, in_n, STATE_SCALES)
        B_unit = B_unit / state_unit
        C_unit = C_unit * state_unit
    fed_unit, C_gain = x_unit, 1.0
    # one scale for all is multiplied once a channel, not once a state
    if B_SCALES <= 1 and STATE_SCALES <= 1:
        fed_unit, B_unit = x_unit * B_unit, 1.0
    if C_SCALES <= 1 and STATE_SCALES <= 1:
        C_gain, C_unit = C_unit, 1.0
    feeding = (fed_unit, factor(dt_scale, e, in_e, DT_SCALES), offset, B_unit)
    reading = (C_unit, C_gain, skip * x_unit, factor(z_scale, e, in_e, Z_SCALES))

    if low_dt is not None:
        m = tl.arange(0, ROWS)
        rows = tokens * batch
        if dt_weight_scale is None:
            dt = few_float(
                low_dt, dt_weight, m, e, rows, E, RANK, LOW_STRIDE, ROWS, BLOCK_E, BLOCK_K
            )
        else:
            sums = few_int8(
                low_dt, dt_weight, m, e, rows, E, RANK, LOW_STRIDE, ROWS, BLOCK_E, BLOCK_K
            )
            dt = scaled(
                sums, m, e, low_dt_scale, dt_weight_scale, dt_scale, rows, E,
                0, 1 if DT_WEIGHT_SCALES > 1 else 0, 1 if DT_SCALES > 1 else 0,
            ).to(tl.int32)  # fmt: skip

    pending = tl.load(run + PENDING)
    if pending > 0:
        advance = tl.load(run + ADVANCE)
        row = tl.load(replay) * batch + sequence
        coming = read(log_x, log_dt, log_B, row, E, E, N, at)
        for j in range(pending):
            token = coming
            row = tl.load(replay + tl.minimum(j + 1, pending - 1)) * batch + sequence
            coming = read(log_x, log_dt, log_B, row, E, E, N, at)
            h = kept(update(h, token, rate, feeding), 1.0, kind)
            if (store == 1) & (j + 1 == advance):
                store_state(targets, h, inside, 1.0, kind)

    if ancestors is not None:
        for t in range(tokens):
            branch = h
            for j in range(t):
                if tl.load(ancestors + t * tokens + j) != 0:
                    row = j * batch + sequence
                    token = read(x, dt, B, row, X_STRIDE, DT_STRIDE, B_STRIDE, at)
                    branch = kept(update(branch, token, rate, feeding), 1.0, kind)
            row = t * batch + sequence
            token = read(x, dt, B, row, X_STRIDE, DT_STRIDE, B_STRIDE, at)
            C_now = tl.load(C + row * C_STRIDE + n, mask=in_n, other=0)
            z_now = tl.load(z + row * Z_STRIDE + e, mask=in_e, other=0)
            branch = update(branch, token, rate, feeding)
            out = output(branch, token[0], C_now, z_now, reading)
            tl.store(y + row * E + e, out, mask=in_e)
            slot = tl.load(slots + t)
            if slot >= 0:
                stash(log_x, log_dt, log_B, slot * batch + sequence, token, at, E, N)
    elif tokens > 0:
        coming = read(x, dt, B, sequence, X_STRIDE, DT_STRIDE, B_STRIDE, at)
        C_coming = tl.load(C + sequence * C_STRIDE + n, mask=in_n, other=0)
        z_coming = tl.load(z + sequence * Z_STRIDE + e, mask=in_e, other=0)
        for t in range(tokens):
            token, C_now, z_now = coming, C_coming, z_coming
            row = tl.minimum(t + 1, tokens - 1) * batch + sequence
            coming = read(x, dt, B, row, X_STRIDE, DT_STRIDE, B_STRIDE, at)
            C_coming = tl.load(C + row * C_STRIDE + n, mask=in_n, other=0)
            z_coming = tl.load(z + row * Z_STRIDE + e, mask=in_e, other=0)
            h = update(h, token, rate, feeding)
            out = output(h, token[0], C_now, z_now, reading)
            tl.store(y + (t * batch + sequence) * E + e, out, mask=in_e)
            h = kept(h, 1.0, kind)
            slot = tl.load(slots + t)
            if slot >= 0:
                stash(log_x, log_dt, log_B, slot * batch + sequence, token, at, E, N)
    if store == 2:
        store_state(targets, h, inside, 1.0, kind)
