"""int8 rows times 4-bit weights in blocks of columns.

`one` row, and up to ALONE of `few` rows, are multiplied as in `triton_blocks`: the sum of what a
thread reads at once is exact, and these are scaled and added in fp32. More rows are multiplied on
tensor cores, and a block's sum is exact.

A byte holds an even column (low nibble) and the odd one after it. Instead of interleaving the
nibbles, x is split into its even and odd columns: two products, one of each. Tensor cores divide
the work as in `linear_int8`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.direct import bytes_of_nibbles
from edge.plugins.linear.triton_blocks import few_alone, store_alone
from edge.plugins.linear.triton_linear_int8 import dot_int8, scaled


@triton.jit
def both_int8(x, j, mask, PAIRED: tl.constexpr):
    """Load columns 2j and 2j+1 of i8 rows; as pairs if rows are aligned to 2 bytes."""
    if PAIRED:
        pair = tl.load(x.to(tl.pointer_type(tl.int16), bitcast=True) + j, mask=mask, other=0)
        return pair.to(tl.int8), (pair >> 8).to(tl.int8)
    else:
        even = tl.load(x + 2 * j, mask=mask, other=0)
        return even, tl.load(x + 2 * j + 1, mask=mask, other=0)


@triton.jit
def middle(least, unit):
    """Return the value of the middle code, which `bytes_of_nibbles` maps to 0."""
    return tl.fma(unit, 8.0, least)


@triton.jit
def one(
    x,  # i8 [K], the only row
    x_scale,  # f32 [1]
    packed,  # u8 [N, K/2]
    scales,  # f32 or f16 [N, K/SHARED]
    y_scale,  # f32 [1] or [N] (Y_SCALE_STEP 0 or 1); None: y is f32
    y,  # i8 or f32 [N]
    M,  # 1
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
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
        x, x_scale, packed, scales, minimums, y_scale, y, first, 1, 1, N, K, 0,
        Y_SCALE_STEP, 4, SHARED, WORD, WORDS, UNIT, BLOCKS, BLOCK_N, ALIGNED,
    )  # fmt: skip


@triton.jit
def few(
    x,  # i8 [M, K], row stride X_STRIDE; M is at most 16
    x_scale,  # f32 [1]
    packed,  # u8 [N, K/2]
    scales,  # f32 or f16 [N, K/SHARED]
    y_scale,  # f32 [1] or [N] (Y_SCALE_STEP 0 or 1); None: y is f32
    y,  # i8 or f32 [M, N]
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
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
                        x, x_scale, packed, scales, minimums, y_scale, y, M, size, N, K,
                        X_STRIDE, Y_SCALE_STEP, 4, SHARED, WORD, WORDS, UNIT, BLOCKS, BLOCK_N,
                        ALIGNED,
                    )  # fmt: skip
                else:
                    few_rows(
                        x, x_scale, packed, scales, y_scale, y, M, size, N, K, X_STRIDE,
                        Y_SCALE_STEP, SHARED, PAIRED, BLOCK_N, BLOCK_K, UNROLL, STAGES, minimums,
                    )  # fmt: skip


@triton.jit
def few_rows(
    x,
    x_scale,
    packed,
    scales,
    y_scale,
    y,
    M,
    ROWS: tl.constexpr,  # at least M
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
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
    HALF: tl.constexpr = SHARED // 2
    BLOCKS: tl.constexpr = K // SHARED
    j = tl.arange(0, BLOCK_K // 2)
    packed += n.to(tl.int64)[:, None] * (K // 2) + j[None, :]
    scales += n.to(tl.int64) * BLOCKS
    if minimums is not None:
        minimums += n.to(tl.int64) * BLOCKS
    x += m[None, :] * X_STRIDE
    rows = (m < M)[None, :] & (j < HALF)[:, None]
    columns = (n < N)[:, None] & (j < HALF)[None, :]
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    zeros = tl.zeros([BLOCK_N, ROWS], tl.int32)
    ones = tl.full([BLOCK_N, BLOCK_K // 2], 1, tl.int8)
    for start in tl.range(0, BLOCKS, UNROLL, num_stages=STAGES):
        for block in tl.static_range(UNROLL):
            b = start + block
            low, high = bytes_of_nibbles(tl.load(packed + b * HALF, mask=columns, other=0))
            even, odd = both_int8(x, b * HALF + j[:, None], rows, PAIRED)
            unit = tl.load(scales + b, mask=n < N, other=0.0).to(tl.float32)
            sums = dot_int8(high, odd, dot_int8(low, even, zeros)).to(tl.float32)
            total = tl.fma(sums, tl.broadcast_to(unit[:, None], sums.shape), total)
            if minimums is not None:
                least = tl.load(minimums + b, mask=n < N, other=0.0).to(tl.float32)
                of_x = dot_int8(ones, odd, dot_int8(ones, even, zeros)).to(tl.float32)
                least = tl.broadcast_to(middle(least, unit)[:, None], of_x.shape)
                total = tl.fma(of_x, least * 16.0, total)
    total *= 0.0625
    out = scaled(tl.trans(total), m, n, x_scale, None, y_scale, M, N, 0, 0, Y_SCALE_STEP)
    tl.store(y + m[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def many(
    x,  # as for `few`; any M
    x_scale,
    packed,
    scales,
    y_scale,
    y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    SHARED: tl.constexpr,
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
    HALF: tl.constexpr = SHARED // 2
    BLOCKS: tl.constexpr = K // SHARED
    j = tl.arange(0, BLOCK_K // 2)
    packed += n.to(tl.int64)[None, :] * (K // 2) + j[:, None]
    scales += n.to(tl.int64) * BLOCKS
    if minimums is not None:
        minimums += n.to(tl.int64) * BLOCKS
    x += m.to(tl.int64)[:, None] * X_STRIDE
    rows = (m < M)[:, None] & (j < HALF)[None, :]
    columns = (n < N)[None, :] & (j < HALF)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for b in tl.range(0, BLOCKS, num_stages=STAGES):
        low, high = bytes_of_nibbles(tl.load(packed + b * HALF, mask=columns, other=0))
        even, odd = both_int8(x, b * HALF + j[None, :], rows, PAIRED)
        unit = tl.load(scales + b, mask=n < N, other=0.0).to(tl.float32)
        sums = dot_int8(odd, high, dot_int8(even, low, zeros)).to(tl.float32)
        total = tl.fma(sums, tl.broadcast_to(unit[None, :], sums.shape), total)
        if minimums is not None:
            least = tl.load(minimums + b, mask=n < N, other=0.0).to(tl.float32)
            of_x = tl.sum(even.to(tl.int32) + odd.to(tl.int32), axis=1).to(tl.float32)
            least = tl.broadcast_to((middle(least, unit) * 16.0)[None, :], total.shape)
            total = tl.fma(tl.broadcast_to(of_x[:, None], total.shape), least, total)
    total *= 0.0625
    out = scaled(total, m, n, x_scale, None, y_scale, M, N, 0, 0, Y_SCALE_STEP)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, out, mask=(m < M)[:, None] & (n < N)[None, :])
