"""Prefill of Mamba-2's scan with an fp32 state, in chunks that are computed in parallel.

In a chunk of tokens, with s[t] = Σ_{i≤t} Δ[i]·A, the outputs and the state are

    y[t] = exp(s[t])·(h·C[t]) + Σ_{j≤t} exp(s[t]-s[j])·Δ[j]·(C[t]·B[j])·x[j] + D·x[t]
    h    = exp(s[last])·h + Σ_j exp(s[last]-s[j])·Δ[j]·x[j] ⊗ B[j]

(SSD: Mamba-2, arXiv 2405.21060, section 6). `scan_terms.prepare` computes Δ, s and C·B. `states`
runs from chunk to chunk and keeps the first states of later chunks; this is the only serial part,
and does nothing else. `outputs` then computes y of all chunks side by side.

s is a sum of two fp32 numbers, so that s[t]-s[j] loses no digits; no exponent is above 0. The
order of summation differs from `scan_heads`: outputs of prefill differ from those of the same
tokens run one by one, as on a CPU, in tests by at most 2·10⁻⁵ of the largest output. Replays before
the run are identical. A NaN in a token's input spreads to all outputs of its chunk.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.products import LEFT, RIGHT, dot
from edge.plugins.kernels.replay import (
    PENDING,
    SOURCE,
    STORE,
    TARGET,
    factor,
    heads_block,
    load_state,
    store_state,
)
from edge.plugins.selective_scan_heads.triton_scan_heads import head_of, replayed
from edge.plugins.selective_scan_heads.triton_scan_terms import rows_scaled, unit_of


@triton.jit
def copy_rows(
    target, to, TO_STRIDE: tl.constexpr, source, row, STRIDE: tl.constexpr, columns, some, inside
):  # fmt: skip
    """Copy `columns` of rows `row` of one tensor to rows `to` of another."""
    mask = some[:, None] & inside[None, :]
    values = tl.load(source + row[:, None] * STRIDE + columns[None, :], mask=mask, other=0)
    tl.store(target + to[:, None] * TO_STRIDE + columns[None, :], values, mask=mask)


@triton.jit
def kept_state(later, chunk, batch, sequence, head, SIZE: tl.constexpr, HEADS: tl.constexpr):
    """Return where the first state [P, N] of a chunk other than the first is kept."""
    rows = ((chunk - 1) * batch + sequence).to(tl.int64)
    return later + (rows * HEADS + head) * SIZE


@triton.jit
def keep_rows(
    inputs, logs, row, to, keep, at, there, SHARING: tl.constexpr, PIECES: tl.constexpr,
    STRIDES: tl.constexpr, LOG_STRIDES: tl.constexpr,
):  # fmt: skip
    """Copy x, dt and B of a chunk's rows to the logs, as `stash` does. A program with the first
    columns of N copies x; one with the first channels copies its columns of B.
    """
    part, piece = tl.program_id(1) // PIECES, tl.program_id(1) % PIECES
    if piece == 0:
        copy_rows(logs[0], to, LOG_STRIDES[0], inputs[0], row, STRIDES[0], at[0], keep, there[0])
    if part == 0:
        if piece == 0:
            values = tl.load(inputs[1] + row * STRIDES[1] + at[1], mask=keep, other=0)
            tl.store(logs[1] + to * LOG_STRIDES[1] + at[1], values, mask=keep)
        if at[1] % SHARING == 0:
            copy_rows(
                logs[2], to, LOG_STRIDES[2], inputs[2], row, STRIDES[2], at[2], keep, there[1]
            )


@triton.jit
def decays(
    delta, sums, begin, tokens, here, row, batch, sequence, head,
    HEADS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return s of the last of STEP tokens from `begin`, as two numbers, and the decay of each
    token's update at the end of that token, times its Δ.
    """
    last = ((tl.minimum(begin + STEP, tokens) - 1) * batch + sequence) * (2 * HEADS) + head
    high, low = tl.load(sums + last), tl.load(sums + last + HEADS)
    at = sums + row * (2 * HEADS) + head
    rest = high - tl.load(at, mask=here, other=0.0)
    rest += low - tl.load(at + HEADS, mask=here, other=0.0)
    step = tl.load(delta + row * HEADS + head, mask=here, other=0.0)
    return high, low, tl.where(here, tl.exp(rest), 0.0) * step


@triton.jit
def states(
    x,  # f32 or i8 [T·B, X_STRIDE]; dt, B and C alike
    dt,
    B,
    C,  # C, D, their scales and y are the CPU's, which computes y here
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
    state,  # f32 [2, batch, HEADS, P, N]
    log_x,  # type of x [S·B, HEADS·P]
    log_dt,  # type of dt [S·B, HEADS]
    log_B,  # type of B [S·B, GROUPS·N]
    y,  # f32 [T·B, HEADS·P]
    run,  # i32 [8]
    replay,  # i32 [S]
    slots,  # i32 [T]
    tokens,  # T
    batch,  # B
    delta,  # this and `sums`, later `alike`, from `prepare`
    sums,
    later,  # f32 [chunks - 1, B, HEADS, P, N]
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of a program
    PIECES: tl.constexpr,  # programs of N
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,  # tokens at a time, divides CHUNK
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,  # 0 for f32
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
):
    sequence = tl.program_id(2)
    block, slot_size, there, at, ends = heads_block(
        state, batch, HEADS, P, N, GROUPS, BLOCK_P, BLOCK_N, PIECES
    )
    p_inside, n_inside = there
    x_at, head, bc_at = at
    inside = p_inside[:, None] & n_inside[None, :]
    h = load_state(block + tl.load(run + SOURCE) * slot_size, inside, 1.0, tl.float32)
    target = block + tl.load(run + TARGET) * slot_size
    x_factor = factor(x_scale, x_at, p_inside, X_SCALES)
    b_factor = factor(B_scale, bc_at, n_inside, B_SCALES)
    dt_factor = factor(dt_scale, head, head < HEADS, DT_SCALES)
    a, _, bias = head_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, head, X_SCALES > 0)
    h = replayed(
        h, (log_x, log_dt, log_B), run, replay, target, inside, 1.0, batch, sequence, at, ends,
        (x_factor, dt_factor, b_factor), (a, bias),
        (HEADS * P, HEADS, GROUPS * N), (DT_MIN, DT_MAX), tl.float32,
    )  # fmt: skip

    t = tl.arange(0, STEP)
    of_state = (x_at - head * P)[:, None] * N + (bc_at - head // (HEADS // GROUPS) * N)[None, :]
    unit = unit_of(x_scale, X_SCALES) * unit_of(B_scale, B_SCALES)
    high, low = 0.0, 0.0
    for begin in range(0, tokens, STEP):
        inner = begin % CHUNK != 0
        if not inner and begin > 0:
            place = kept_state(later, begin // CHUNK, batch, sequence, head, P * N, HEADS)
            tl.store(place + of_state, h, mask=inside)
        here = begin + t < tokens
        row = (begin + t) * batch + sequence
        # in every chunk, s starts at 0
        before, low_before = tl.where(inner, high, 0.0), tl.where(inner, low, 0.0)
        high, low, remains = decays(
            delta, sums, begin, tokens, here, row, batch, sequence, head, HEADS, STEP
        )
        lasts = tl.exp((high - before) + (low - low_before))
        some = here[:, None] & p_inside[None, :]
        xs = tl.load(x + row[:, None] * X_STRIDE + x_at[None, :], mask=some, other=0)
        some = here[:, None] & n_inside[None, :]
        b = tl.load(B + row[:, None] * B_STRIDE + bc_at[None, :], mask=some, other=0)
        fed = rows_scaled(b, b_factor, B_SCALES) * (remains * unit)[:, None]
        xs = tl.trans(rows_scaled(xs, x_factor, X_SCALES))
        h = dot(xs, fed, lasts * h, LEFT if X_SCALES == 1 else 0)
    if tl.load(run + STORE) == 2:
        store_state(target, h, inside, 1.0, tl.float32)

    for begin in range(0, tokens, STEP):
        slot = tl.load(slots + begin + t, mask=begin + t < tokens, other=-1)
        keep_rows(
            (x, dt, B), (log_x, log_dt, log_B), (begin + t) * batch + sequence,
            slot * batch + sequence, slot >= 0, at, there, HEADS // GROUPS, PIECES,
            (X_STRIDE, DT_STRIDE, B_STRIDE), (HEADS * P, HEADS, GROUPS * N),
        )  # fmt: skip


@triton.jit
def mixture(
    alike, delta, sums, row, row_j, t, j, here, here_j, head, group, skip,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the weight of x[j] in y[t], [t, j], and s[t]: decay · Δ[j] · C[t]·B[j], and D."""
    from_t = sums + row * (2 * HEADS) + head
    from_j = sums + row_j * (2 * HEADS) + head
    high = tl.load(from_t, mask=here, other=0.0)
    low = tl.load(from_t + HEADS, mask=here, other=0.0)
    high_j = tl.load(from_j, mask=here_j, other=0.0)
    low_j = tl.load(from_j + HEADS, mask=here_j, other=0.0)
    step = tl.load(delta + row_j * HEADS + head, mask=here_j, other=0.0)
    fade = tl.exp((high[:, None] - high_j[None, :]) + (low[:, None] - low_j[None, :]))
    fade = tl.where((t[:, None] >= j[None, :]) & here[:, None], fade, 0.0) * step[None, :]
    place = alike + (row[:, None] * GROUPS + group) * CHUNK + j[None, :]
    mixed = tl.load(place, mask=here[:, None] & here_j[None, :], other=0.0) * fade
    return mixed + tl.where(t[:, None] == j[None, :], skip, 0.0), high


@triton.jit
def first_state(
    h, places, logs, run, replay, batch, sequence, head, p, n, group, factors, layer,
    HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    LIMITS: tl.constexpr,
):  # fmt: skip
    """Return some of the first chunk's first state: h after the pending tokens, as in `states`."""
    at = (head * P + p, head, group * N + n)
    ends = (head * P + P, head + 1, group * N + N)
    nowhere = (p < 0)[:, None] & (n < 0)[None, :]  # `states` stores
    return replayed(
        h, logs, run, replay, places, nowhere, 1.0, batch, sequence, at, ends, factors, layer,
        (HEADS * P, HEADS, GROUPS * N), LIMITS, tl.float32,
    )  # fmt: skip


@triton.jit
def outputs(
    x,
    C,
    A,
    D,
    dt_bias,
    x_scale,
    dt_scale,
    B_scale,
    C_scale,
    A_scale,
    D_scale,
    dt_bias_scale,
    state,
    log_x,
    log_dt,
    log_B,
    y,
    run,
    replay,
    tokens,
    batch,
    delta,
    sums,
    alike,
    later,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PARTS: tl.constexpr,  # programs of P
    BLOCK_N: tl.constexpr,  # columns of N at a time
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,  # tokens of a program, divides CHUNK
    X_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
):
    """Compute y of some tokens of one chunk, and some channels of a head; arguments as above."""
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    chunk, sequence = tl.program_id(1) * ROWS // CHUNK, tl.program_id(2)
    t, j = tl.program_id(1) * ROWS % CHUNK + tl.arange(0, ROWS), tl.arange(0, CHUNK)
    here, here_j = chunk * CHUNK + t < tokens, chunk * CHUNK + j < tokens
    row = (chunk * CHUNK + t) * batch + sequence
    row_j = (chunk * CHUNK + j) * batch + sequence
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    x_at, group = head * P + p, head // (HEADS // GROUPS)
    a, skip, bias = head_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, head, X_SCALES > 0)
    x_factor = factor(x_scale, x_at, p < P, X_SCALES)
    dt_factor = factor(dt_scale, head, head < HEADS, DT_SCALES)
    slot = tl.load(run + SOURCE) * (batch.to(tl.int64) * (HEADS * P * N))
    place = state + slot + (sequence * HEADS + head) * (P * N)
    waiting = 0
    if chunk > 0:
        place = kept_state(later, chunk, batch, sequence, head, P * N, HEADS)
    else:
        waiting = tl.load(run + PENDING)

    out = tl.zeros((ROWS, BLOCK_P), tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        at = group * N + n
        some = here[:, None] & (n < N)[None, :]
        c = tl.load(C + row[:, None] * C_STRIDE + at[None, :], mask=some, other=0)
        some = (p < P)[:, None] & (n < N)[None, :]
        places = place + p[:, None] * N + n[None, :]
        h = tl.load(places, mask=some, other=0.0)
        if waiting > 0:
            b_factor = factor(B_scale, at, n < N, B_SCALES)
            h = first_state(
                h, places, (log_x, log_dt, log_B), run, replay, batch, sequence, head, p, n, group,
                (x_factor, dt_factor, b_factor), (a, bias), HEADS, P, N, GROUPS, (DT_MIN, DT_MAX),
            )  # fmt: skip
        c = rows_scaled(c, factor(C_scale, at, n < N, C_SCALES), C_SCALES)
        out = dot(c, tl.trans(h), out, LEFT if C_SCALES == 1 else 0)

    mixed, high = mixture(
        alike, delta, sums, row, row_j, t, j, here, here_j, head, group, skip, HEADS, GROUPS, CHUNK
    )
    some = here_j[:, None] & (p < P)[None, :]
    xs = tl.load(x + row_j[:, None] * X_STRIDE + x_at[None, :], mask=some, other=0)
    xs = rows_scaled(xs, x_factor, X_SCALES)
    out = out * (tl.exp(high) * unit_of(C_scale, C_SCALES))[:, None]
    mixed = mixed * unit_of(x_scale, X_SCALES)
    out = dot(mixed, xs, out, RIGHT if X_SCALES == 1 else 0)
    some = here[:, None] & (p < P)[None, :]
    tl.store(y + row[:, None] * (HEADS * P) + x_at[None, :], out, mask=some)
