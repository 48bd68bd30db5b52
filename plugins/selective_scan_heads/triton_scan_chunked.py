"""Prefill of Mamba-2's scan with an fp32 state, in chunks, by matrix products.

In a chunk of tokens, with s[t] = Σ_{i≤t} Δ[i]·A, the outputs and the state are

    y[t] = exp(s[t])·(h·C[t]) + Σ_{j≤t} exp(s[t]-s[j])·Δ[j]·(C[t]·B[j])·x[j] + D·x[t]
    h    = exp(s[last])·h + Σ_j exp(s[last]-s[j])·Δ[j]·x[j] ⊗ B[j]

(SSD: Mamba-2, arXiv 2405.21060, section 6). s[t]-s[j] is computed as the sum from j+1 to t, not as
a difference, so no exponent is above 0 and long chunks lose no digits. A program holds the states
of some channels of one head of one sequence, and runs the chunks one after the other.

The order of summation differs from `scan_heads`: outputs of prefill differ from those of the same
tokens run one by one, as on a CPU, in tests by at most 2·10⁻⁵ of the largest output. Replays before
the run are identical. A NaN in a token's input spreads to all outputs of its chunk.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import tensor_cores
from edge.plugins.kernels.replay import (
    SOURCE,
    STORE,
    TARGET,
    factor,
    heads_block,
    load_state,
    store_state,
)
from edge.plugins.linear.triton_linear_int8 import dot_int8
from edge.plugins.selective_scan_heads.triton_scan_heads import clamped_step, head_of, replayed


@triton.jit
def dot(a, b, WHOLE: tl.constexpr = False):
    """Return a · b with fp32 accuracy. tf32 has 11 bits, so fp32 values are split in two parts.

    The sum takes three products of parts (tf32x3), or two if a is WHOLE: integers of ≤ 11 bits.
    """
    if not tensor_cores():
        product = tl.dot(a, b, input_precision="ieee")
    elif WHOLE:
        high = (b.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        product = tl.dot(a, b - high, input_precision="tf32")
        product = tl.dot(a, high, product, input_precision="tf32")
    else:
        product = tl.dot(a, b, input_precision="tf32x3")
    return product


@triton.jit
def scaled(values, scales, SCALES: tl.constexpr):
    """Return rows of channels as fp32, times the shared scale or the scale of each channel."""
    return values.to(tl.float32) * (scales[None, :] if SCALES > 1 else scales)


@triton.jit
def decays(delta, a, t):
    """Return the decays of a chunk: log decay Δ·A of each token; decay of j's update at t, times
    Δ[j], [t, j]; decay of each token's update at the end of the chunk, times its Δ.
    """
    rate = delta * a
    # [i, j]: token i's log decay if i > j; the cumulative sum is the log decay from j to t
    steps = tl.where(t[:, None] > t[None, :], rate[:, None], 0.0)
    reaches = t[:, None] >= t[None, :]
    fade = tl.where(reaches, tl.exp(tl.cumsum(steps, 0)), 0.0) * delta[None, :]
    return rate, fade, tl.exp(tl.sum(steps, 0)) * delta


@triton.jit
def products(
    B, C, B_scale, C_scale, row, here, first, N: tl.constexpr, CHUNK: tl.constexpr,
    B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr,
    B_SCALES: tl.constexpr, C_SCALES: tl.constexpr,
):  # fmt: skip
    """Return C[t]·B[j] of a chunk's rows, [t, j], over N columns from `first`, 32 at a time."""
    PIECE: tl.constexpr = 32
    out = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, N, PIECE):
        piece = start + tl.arange(0, PIECE)
        some = here[:, None] & (piece < N)[None, :]
        at = first + piece
        b = tl.load(B + row[:, None] * B_STRIDE + at[None, :], mask=some, other=0)
        c = tl.load(C + row[:, None] * C_STRIDE + at[None, :], mask=some, other=0)
        b = scaled(b, factor(B_scale, at, piece < N, B_SCALES), B_SCALES)
        c = scaled(c, factor(C_scale, at, piece < N, C_SCALES), C_SCALES)
        out += dot(c, tl.trans(b))
    return out


@triton.jit
def copy_rows(
    target, to, TO_STRIDE: tl.constexpr, source, row, STRIDE: tl.constexpr, columns, some, inside
):  # fmt: skip
    """Copy `columns` of rows `row` of one tensor to rows `to` of another."""
    mask = some[:, None] & inside[None, :]
    values = tl.load(source + row[:, None] * STRIDE + columns[None, :], mask=mask, other=0)
    tl.store(target + to[:, None] * TO_STRIDE + columns[None, :], values, mask=mask)


@triton.jit
def keep_rows(
    inputs, logs, row, to, keep, at, there, SHARING: tl.constexpr,
    STRIDES: tl.constexpr, LOG_STRIDES: tl.constexpr,
):  # fmt: skip
    """Copy x, dt and B of a chunk's rows to the logs, as `stash` does."""
    copy_rows(logs[0], to, LOG_STRIDES[0], inputs[0], row, STRIDES[0], at[0], keep, there[0])
    if tl.program_id(1) == 0:
        values = tl.load(inputs[1] + row * STRIDES[1] + at[1], mask=keep, other=0)
        tl.store(logs[1] + to * LOG_STRIDES[1] + at[1], values, mask=keep)
        if at[1] % SHARING == 0:
            copy_rows(
                logs[2], to, LOG_STRIDES[2], inputs[2], row, STRIDES[2], at[2], keep, there[1]
            )


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
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N and 32
    CHUNK: tl.constexpr,  # tokens per chunk, a power of two, at least 16
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
        state, batch, HEADS, P, N, GROUPS, BLOCK_P, BLOCK_N
    )
    p_inside, n_inside = there
    inside = p_inside[:, None] & n_inside[None, :]
    x_at, head, bc_at = at
    WHOLE: tl.constexpr = B_SCALES == 1 and C_SCALES == 1  # C·B is a product of integers

    h = load_state(block + tl.load(run + SOURCE) * slot_size, inside, 1.0, tl.float32)
    target = block + tl.load(run + TARGET) * slot_size
    x_factor = factor(x_scale, x_at, p_inside, X_SCALES)
    dt_factor = factor(dt_scale, head, head < HEADS, DT_SCALES)
    a, skip, bias = head_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, head, X_SCALES > 0)
    h = replayed(
        h, (log_x, log_dt, log_B), run, replay, target, inside, 1.0, batch, sequence, at, ends,
        (x_factor, dt_factor, factor(B_scale, bc_at, n_inside, B_SCALES)), (a, bias),
        (HEADS * P, HEADS, GROUPS * N), (DT_MIN, DT_MAX), tl.float32,
    )  # fmt: skip

    t = tl.arange(0, CHUNK)
    for first in range(0, tokens, CHUNK):
        here = first + t < tokens
        row = (first + t) * batch + sequence
        dt_raw = tl.load(dt + row * DT_STRIDE + head, mask=here, other=0)
        delta = clamped_step(dt_raw.to(tl.float32) * dt_factor, bias, DT_MIN, DT_MAX)
        rate, fade, remains = decays(tl.where(here, delta, 0.0), a, t)

        x_inside = here[:, None] & p_inside[None, :]
        xs = tl.load(x + row[:, None] * X_STRIDE + x_at[None, :], mask=x_inside, other=0)
        xs = scaled(xs, x_factor, X_SCALES)
        bc_inside = here[:, None] & n_inside[None, :]
        b_rows = B + row[:, None] * B_STRIDE + bc_at[None, :]
        c_rows = C + row[:, None] * C_STRIDE + bc_at[None, :]
        b_factor = factor(B_scale, bc_at, n_inside, B_SCALES)
        c_factor = factor(C_scale, bc_at, n_inside, C_SCALES)
        if WHOLE:
            b = tl.load(b_rows, mask=bc_inside, other=0)
            c = tl.load(c_rows, mask=bc_inside, other=0)
            counts = dot_int8(c, tl.trans(b), tl.zeros((CHUNK, CHUNK), tl.int32))
            alike = counts.to(tl.float32) * (b_factor * c_factor)
        else:
            alike = products(
                B, C, B_scale, C_scale, row, here, head // (HEADS // GROUPS) * N,
                N, CHUNK, B_STRIDE, C_STRIDE, B_SCALES, C_SCALES,
            )  # fmt: skip
        out = dot(alike * fade, xs) + skip * xs
        # The barriers keep the compiler from hoisting all loads, which would spill registers.
        tl.debug_barrier()
        faded = tl.exp(tl.cumsum(rate, 0))
        c = tl.load(c_rows, mask=bc_inside, other=0)
        if WHOLE:
            out += (faded * c_factor)[:, None] * dot(c.to(tl.float32), tl.trans(h), True)
        else:
            out += faded[:, None] * dot(scaled(c, c_factor, C_SCALES), tl.trans(h))
        tl.store(y + row[:, None] * (HEADS * P) + x_at[None, :], out, mask=x_inside)
        tl.debug_barrier()
        b = tl.load(b_rows, mask=bc_inside, other=0)
        fed = dot(tl.trans(xs * remains[:, None]), scaled(b, b_factor, B_SCALES))
        h = tl.exp(tl.sum(rate, 0)) * h + fed
    if tl.load(run + STORE) == 2:
        store_state(target, h, inside, 1.0, tl.float32)

    # Rows for the logs are read again: holding them until here would take too many registers.
    for first in range(0, tokens, CHUNK):
        slot = tl.load(slots + first + t, mask=first + t < tokens, other=-1)
        keep_rows(
            (x, dt, B), (log_x, log_dt, log_B), (first + t) * batch + sequence,
            slot * batch + sequence, slot >= 0, at, there, HEADS // GROUPS,
            (X_STRIDE, DT_STRIDE, B_STRIDE), (HEADS * P, HEADS, GROUPS * N),
        )  # fmt: skip
