"""fp32 rows times weights of 8 or 4 bits in blocks of columns that share a scale.

Quants are small integers, exact in fp16. x is rounded to fp16, as with fp16 weights, and a block is
summed in fp32 before it is scaled. Low and high nibbles are multiplied by the even and odd columns
of x, as in `linear_int4`; `few` and `many` divide the work as in `linear_int8`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.linear.triton_linear import dot_float, to_half


@triton.jit
def centred(quant, zero: tl.constexpr):
    """Return u8 quants minus their zero point as f16: q becomes the low bits of 1024 + q."""
    return (quant.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)


@triton.jit
def both_half(x, j, mask, PAIRED: tl.constexpr):
    """Load columns 2j and 2j+1 of f32 rows as f16; as pairs if rows are aligned to 8 bytes."""
    if PAIRED:
        pair = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + j, mask=mask, other=0)
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x + 2 * j, mask=mask, other=0.0)
        odd = tl.load(x + 2 * j + 1, mask=mask, other=0.0)
    return to_half(even), to_half(odd)


@triton.jit
def few(
    x,  # f32 [M, K], row stride X_STRIDE; M is at most 16
    packed,  # u8 [N, K·BITS/8]
    scales,  # f32 or f16 [N, K/SHARED]
    y,  # f32 [M, N]
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns that share a scale
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16, at least M
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of a block, rounded up to a power of 2
    UNROLL: tl.constexpr,  # blocks per step, divides K/SHARED
    STAGES: tl.constexpr,  # set on the loop so that scales are prefetched too
    minimums=None,  # like scales: the value of quant 0; None: the middle quant is 0
):
    m = tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = SHARED * BITS // 8
    BLOCKS: tl.constexpr = K // SHARED
    j = tl.arange(0, BLOCK_K * BITS // 8)
    packed += n.to(tl.int64)[:, None] * (BLOCKS * BYTES) + j[None, :]
    scales += n.to(tl.int64) * BLOCKS
    ZERO: tl.constexpr = (8 if BITS == 4 else 128) if minimums is None else 0
    if minimums is not None:
        minimums += n.to(tl.int64) * BLOCKS
    x += m[None, :] * X_STRIDE
    rows = (m < M)[None, :] & (j < BYTES)[:, None]
    columns = (n < N)[:, None] & (j < BYTES)[None, :]
    zeros = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total = zeros
    for start in tl.range(0, BLOCKS, UNROLL, num_stages=STAGES):
        for block in tl.static_range(UNROLL):
            first = (start + block) * BYTES
            w = tl.load(packed + first, mask=columns, other=0)
            unit = tl.load(scales + start + block, mask=n < N, other=0.0)
            if BITS == 4:
                even, odd = both_half(x, first + j[:, None], rows, PAIRED)
                sums = dot_float(centred(w & 15, ZERO), even, zeros)
                sums = dot_float(centred(w >> 4, ZERO), odd, sums)
            else:
                of_x = tl.load(x + first + j[:, None], mask=rows, other=0.0)
                sums = dot_float(centred(w, ZERO), to_half(of_x), zeros)
            total += sums * unit[:, None]
            if minimums is not None:
                least = tl.load(minimums + start + block, mask=n < N, other=0.0)
                of_x = tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=0)
                total += least.to(tl.float32)[:, None] * of_x[None, :]
    out = tl.trans(total)
    tl.store(y + m[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def many(
    x,  # as for `few`; any M
    packed,
    scales,
    y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    PIECE: tl.constexpr,  # columns of a block multiplied at once
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    minimums=None,
):
    # Adjacent programs share weights: a chunk of rows fits in L2, so weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = PIECE * BITS // 8
    PIECES: tl.constexpr = K // PIECE
    j = tl.arange(0, BLOCK_K * BITS // 8)
    packed += n.to(tl.int64)[None, :] * (PIECES * BYTES) + j[:, None]
    scales += n.to(tl.int64) * (K // SHARED)
    ZERO: tl.constexpr = (8 if BITS == 4 else 128) if minimums is None else 0
    if minimums is not None:
        minimums += n.to(tl.int64) * (K // SHARED)
    x += m.to(tl.int64)[:, None] * X_STRIDE
    rows = (m < M)[:, None] & (j < BYTES)[None, :]
    columns = (n < N)[None, :] & (j < BYTES)[:, None]
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = zeros
    for piece in tl.range(0, PIECES, num_stages=STAGES):
        first = piece * BYTES
        w = tl.load(packed + first, mask=columns, other=0)
        unit = tl.load(scales + piece // (SHARED // PIECE), mask=n < N, other=0.0)
        if BITS == 4:
            even, odd = both_half(x, first + j[None, :], rows, PAIRED)
            sums = dot_float(even, centred(w & 15, ZERO), zeros)
            sums = dot_float(odd, centred(w >> 4, ZERO), sums)
        else:
            of_x = tl.load(x + first + j[None, :], mask=rows, other=0.0)
            sums = dot_float(to_half(of_x), centred(w, ZERO), zeros)
        total += sums * unit[None, :]
        if minimums is not None:
            least = tl.load(minimums + piece // (SHARED // PIECE), mask=n < N, other=0.0)
            of_x = tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=1)
            total += least.to(tl.float32)[None, :] * of_x[:, None]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, total, mask=(m < M)[:, None] & (n < N)[None, :])
