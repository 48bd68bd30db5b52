"""What a scan in chunks needs of a chunk and no state gives: Δ, sums of decays, products C·B.

See `triton_scan_chunks`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.products import dot
from edge.plugins.kernels.replay import factor
from edge.plugins.linear.triton_linear_int8 import dot_int8
from edge.plugins.selective_scan_heads.triton_scan_heads import clamped_step


@triton.jit
def rows_scaled(values, scales, SCALES: tl.constexpr):
    """Return rows of channels as fp32, times the scale of each channel, if there is one for each.

    A shared scale is left to the caller: int8 values stay integers.
    """
    values = values.to(tl.float32)
    if SCALES > 1:
        values = values * scales[None, :]
    return values


@triton.jit
def unit_of(scale, SCALES: tl.constexpr):
    """Return the scale that `rows_scaled` leaves to the caller."""
    value = 1.0
    if SCALES == 1:
        value = tl.load(scale)
    return value


@triton.jit
def store_steps(
    dt, A, dt_bias, dt_scale, A_scale, dt_bias_scale, delta, sums, tokens, batch, head,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, DT_STRIDE: tl.constexpr, DT_SCALES: tl.constexpr,
    DT_MIN: tl.constexpr, DT_MAX: tl.constexpr,
):  # fmt: skip
    """Store Δ and s of a chunk's tokens, for some heads."""
    real = head < HEADS
    a = tl.load(A + head, mask=real, other=0).to(tl.float32)
    bias = tl.load(dt_bias + head, mask=real, other=0).to(tl.float32)
    t = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = (t * batch + tl.program_id(1))[:, None]
    inside = (t < tokens)[:, None] & real[None, :]
    raw = tl.load(dt + row * DT_STRIDE + head[None, :], mask=inside, other=0).to(tl.float32)
    if DT_SCALES > 0:
        a = -tl.exp(a * tl.load(A_scale))
        bias = bias * tl.load(dt_bias_scale)
        raw = raw * tl.load(dt_scale + head % DT_SCALES, mask=real, other=0.0)[None, :]
    step = clamped_step(raw, bias[None, :], DT_MIN, DT_MAX)
    # exp(-200) is 0 in fp32: the bound changes no decay, and there is no infinity to subtract
    rate = step * a[None, :]
    total = tl.cumsum(tl.where(rate < -200.0, -200.0, rate).to(tl.float64), 0)
    high = total.to(tl.float32)
    at = sums + row * (2 * HEADS) + head[None, :]
    tl.store(delta + row * HEADS + head[None, :], step, mask=inside)
    tl.store(at, high, mask=inside)
    tl.store(at + HEADS, (total - high.to(tl.float64)).to(tl.float32), mask=inside)


@triton.jit
def store_products(
    B, C, B_scale, C_scale, alike, tokens, batch, group,
    GROUPS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr,
    B_SCALES: tl.constexpr, C_SCALES: tl.constexpr,
):  # fmt: skip
    """Store C[t]·B[j] for the tokens t and j of a chunk, of one group."""
    WHOLE: tl.constexpr = B_SCALES == 1 and C_SCALES == 1  # a product of integers
    t = tl.arange(0, CHUNK)
    here = tl.program_id(0) * CHUNK + t < tokens
    row = (tl.program_id(0) * CHUNK + t) * batch + tl.program_id(1)
    out = tl.zeros((CHUNK, CHUNK), tl.int32 if WHOLE else tl.float32)
    for start in range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        some = here[:, None] & (n < N)[None, :]
        at = group * N + n
        b = tl.load(B + row[:, None] * B_STRIDE + at[None, :], mask=some, other=0)
        c = tl.load(C + row[:, None] * C_STRIDE + at[None, :], mask=some, other=0)
        if WHOLE:
            out = dot_int8(c, tl.trans(b), out)
        else:
            b = rows_scaled(b, factor(B_scale, at, n < N, B_SCALES), B_SCALES)
            c = rows_scaled(c, factor(C_scale, at, n < N, C_SCALES), C_SCALES)
            out = dot(c, tl.trans(b), out, 0)
    unit = unit_of(B_scale, B_SCALES) * unit_of(C_scale, C_SCALES)
    place = alike + (row[:, None] * GROUPS + group) * CHUNK + t[None, :]
    tl.store(place, out.to(tl.float32) * unit, mask=here[:, None])


@triton.jit
def prepare(
    dt,  # f32 or i8 [T·B, DT_STRIDE]; B and C alike
    B,
    C,
    A,  # f32 [HEADS], or i8: A = -exp(A_scale·A)
    dt_bias,  # f32 or i8 [HEADS]
    dt_scale,  # f32 [DT_SCALES]: one, or one per head; all scales are None if dt is f32
    B_scale,
    C_scale,
    A_scale,  # f32 [1]
    dt_bias_scale,
    tokens,  # T
    batch,  # B
    delta,  # f32 [T·B, HEADS]: Δ
    sums,  # f32 [T·B, 2, HEADS]: s as two numbers
    alike,  # f32 [T·B, GROUPS, CHUNK]: C[t]·B[j], j from the start of t's chunk
    HEADS: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    DT_MIN: tl.constexpr,
    DT_MAX: tl.constexpr,
):
    """Compute what depends on no state. A program has some heads of a chunk, or a group of it."""
    part = tl.program_id(2)
    if part < GROUPS:
        store_products(
            B, C, B_scale, C_scale, alike, tokens, batch, part, GROUPS, N, CHUNK, BLOCK_N,
            B_STRIDE, C_STRIDE, B_SCALES, C_SCALES,
        )  # fmt: skip
    else:
        store_steps(
            dt, A, dt_bias, dt_scale, A_scale, dt_bias_scale, delta, sums, tokens, batch,
            (part - GROUPS) * BLOCK_H + tl.arange(0, BLOCK_H),
            HEADS, CHUNK, DT_STRIDE, DT_SCALES, DT_MIN, DT_MAX,
        )  # fmt: skip
