"""fp32 rows times weights of 8 or 4 bits in blocks of columns that share a scale.

`one` row, and up to ALONE of `few` rows, are multiplied in fp32 as in `triton_blocks`. More rows
are rounded to fp16, as with fp16 weights, and multiplied on tensor cores. Codes are exact in fp16,
and a block is summed in fp32 before it is scaled. Only `many` for 4 bits scales the weights first
and rounds them to fp16, because for 32 columns scaling the sums costs more than the product. Low
and high nibbles are multiplied by the even and odd columns of x, as in `linear_int4`; tensor cores
divide the work as in `linear_int8`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.direct import halves_of, halves_of_nibbles, scaled_halves
from edge.plugins.linear.triton_blocks import few_alone, store_alone
from edge.plugins.linear.triton_linear import dot_float, to_half


@triton.jit
def weights_of(packed, unit, least):
    """Return low and high codes · unit + least, or (code - 8) · unit if least is None, as f16.

    As with fp16 weights, values below 6·10⁻⁵ lose digits.
    """
    low, high = halves_of_nibbles(packed)
    if least is None:
        low = ((low.to(tl.float32) - 1032.0) * unit.to(tl.float32)).to(tl.float16)
        high = ((high.to(tl.float32) - 1032.0) * unit.to(tl.float32)).to(tl.float16)
    elif unit.dtype == tl.float16:
        low, high = scaled_halves(low, unit, least), scaled_halves(high, unit, least)
    else:
        low = tl.fma(low.to(tl.float32) - 1024.0, unit, least).to(tl.float16)
        high = tl.fma(high.to(tl.float32) - 1024.0, unit, least).to(tl.float16)
    return low, high


@triton.jit
def both_floats(x, j, mask, PAIRED: tl.constexpr):
    """Load columns 2j and 2j+1 of f32 rows; as pairs if rows are aligned to 8 bytes."""
    if PAIRED:
        pair = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + j, mask=mask, other=0)
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x + 2 * j, mask=mask, other=0.0)
        odd = tl.load(x + 2 * j + 1, mask=mask, other=0.0)
    return even, odd


@triton.jit
def one(
    x,  # f32 [K], the only row
    packed,  # u8 [N, K·BITS/8]
    scales,  # f32 or f16 [N, K/SHARED]
    y,  # f32 [N]
    M,  # 1
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    WORD: tl.constexpr,  # these: see `rows_by_blocks`
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr = 1,  # of earlier plans, as are the defaults of the next two
    UNIT: tl.constexpr = 1,
    ALIGNED: tl.constexpr = False,
    minimums=None,
):
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    store_alone(
        x, None, packed, scales, minimums, None, y, first, 1, 1, N, K, 0,
        0, BITS, SHARED, WORD, WORDS, UNIT, BLOCKS, BLOCK_N, ALIGNED,
    )  # fmt: skip


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
    ALONE: tl.constexpr = 0,  # up to so many rows, threads multiply alone; 0 in earlier plans
    WORD: tl.constexpr = 0,  # these five: see `rows_by_blocks`
    WORDS: tl.constexpr = 0,
    UNIT: tl.constexpr = 0,
    BLOCKS: tl.constexpr = 0,
    ALIGNED: tl.constexpr = False,
    minimums=None,  # like scales: the value of code 0; None: the middle code is 0
):
    # the least size that holds M; a range of constants, of which 2, 4, 8 and 16 are sizes
    for size in tl.static_range(2, ROWS + 1, 2):
        if ((size == 2 or size == 4) and size <= ALONE) or size == 8 or size == 16:
            less = 8 if size > 8 else min(ALONE, size // 4 * 2)
            if (less < M) & (size >= M):
                if size <= ALONE:
                    few_alone(
                        x, None, packed, scales, minimums, None, y, M, size, N, K,
                        X_STRIDE, 0, BITS, SHARED, WORD, WORDS, UNIT, BLOCKS, BLOCK_N, ALIGNED,
                    )  # fmt: skip
                else:
                    few_rows(
                        x, packed, scales, y, M, size, N, K, X_STRIDE, BITS, SHARED, PAIRED,
                        BLOCK_N, BLOCK_K, UNROLL, STAGES, minimums,
                    )  # fmt: skip


@triton.jit
def few_rows(
    x,
    packed,
    scales,
    y,
    M,
    ROWS: tl.constexpr,  # at least M
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    minimums,
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
            unit = tl.load(scales + start + block, mask=n < N, other=0.0).to(tl.float32)
            if BITS == 4:
                even, odd = both_floats(x, first + j[:, None], rows, PAIRED)
                low, high = halves_of_nibbles(w)
                sums = dot_float(low - (1024.0 + ZERO), to_half(even), zeros)
                sums = dot_float(high - (1024.0 + ZERO), to_half(odd), sums)
            else:
                all_x = to_half(tl.load(x + first + j[:, None], mask=rows, other=0.0))
                sums = dot_float(halves_of(w) - (1024.0 + ZERO), all_x, zeros)
            total = scaled_sum(sums, unit, total)
            if minimums is not None:
                least = tl.load(minimums + start + block, mask=n < N, other=0.0).to(tl.float32)
                of_x = tl.sum(even + odd, axis=0)
                of_x = tl.broadcast_to(of_x[None, :], sums.shape)
                total = scaled_sum(of_x, least, total)
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
    PIECE: tl.constexpr,  # columns of one scale that are multiplied at once, divides SHARED
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # PIECE, rounded up to a power of 2
    STAGES: tl.constexpr,
    PIECES: tl.constexpr = 1,  # per step, a power of 2; 1 unless PIECE is SHARED
    minimums=None,
):
    tl.static_assert(BITS == 4 or minimums is None)
    tl.static_assert(PIECES == 1 or (BITS == 4 and PIECE == SHARED))
    # Adjacent programs share weights: a chunk of rows fits in L2, so weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = PIECE * BITS // 8
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8
    COUNT: tl.constexpr = K // PIECE
    piece, byte = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    at = piece[:, None] * BYTES + byte[None, :]  # of a step's bytes; byte j has column j or two
    packed += n.to(tl.int64)[:, None, None] * (COUNT * BYTES) + at[None, :, :]
    scales += n.to(tl.int64)[:, None] * (K // SHARED)
    if minimums is not None:
        minimums += n.to(tl.int64)[:, None] * (K // SHARED)
    x += m.to(tl.int64)[:, None, None] * X_STRIDE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, COUNT, PIECES, num_stages=STAGES):
        there = start + piece < COUNT
        some = there[:, None] & (byte < BYTES)[None, :]
        inside = (n < N)[:, None] & there[None, :]
        rows = (m < M)[:, None, None] & some[None, :, :]
        codes = tl.load(packed + start * BYTES, (n < N)[:, None, None] & some[None, :, :], 0)
        group = ((start + piece) // (SHARED // PIECE))[None, :]
        unit = tl.load(scales + group, inside, 0.0)
        if BITS == 4:
            unit, least = tl.broadcast_to(unit[:, :, None], codes.shape), None
            if minimums is not None:
                least = tl.load(minimums + group, inside, 0.0)
                least = tl.broadcast_to(least[:, :, None], codes.shape)
            even, odd = both_floats(x, start * BYTES + at[None, :, :], rows, PAIRED)
            low, high = weights_of(codes, unit, least)
            total = product(to_half(odd), high, product(to_half(even), low, total))
        else:
            of_x = to_half(tl.load(x + start * BYTES + at[None, :, :], rows, 0.0))
            zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            sums = product(of_x, halves_of(codes) - 1152.0, zeros)
            unit = tl.reshape(unit, (1, BLOCK_N)).to(tl.float32)
            total = tl.fma(sums, tl.broadcast_to(unit, sums.shape), total)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def scaled_sum(sums, unit, total):
    """Return total + sums · unit, for sums [BLOCK_N, ROWS] and unit [BLOCK_N]."""
    return tl.fma(sums, tl.broadcast_to(unit[:, None], sums.shape), total)


@triton.jit
def product(x, weight, total):
    """Return total + x · weightᵀ, for x [BLOCK_M, PIECES, WIDTH] and weight [BLOCK_N, …]."""
    flat_x = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    flat = tl.reshape(weight, (weight.shape[0], weight.shape[1] * weight.shape[2]))
    return dot_float(flat_x, tl.trans(flat), total)
