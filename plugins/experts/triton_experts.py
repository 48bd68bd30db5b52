"""Products with the chosen experts. A program has one expert, some of its outputs and all its rows.

A program whose expert was not chosen exits after reading `chosen`. Rows are gathered by `order` in
tiles of BLOCK_M, so only weights of chosen experts are read, once per tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.experts.triton_route import span
from edge.plugins.kernels.common import round8
from edge.plugins.kernels.direct import halves_of, halves_of_nibbles
from edge.plugins.linear.triton_linear import dot_float, to_half
from edge.plugins.linear.triton_linear_int8 import dot_int8


@triton.jit
def places(
    order, first, m, count, n,
    N: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr,
    X_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return the offsets of an expert's rows m in x, [M], and of their columns n in y, [M, N]."""
    pair = tl.load(order + first + m, mask=m < count, other=0).to(tl.int64)
    row, slot = pair // SLOTS, pair % SLOTS
    begins = row * X_STRIDE
    if OWN:
        begins += slot * K
    PART: tl.constexpr = N // PARTS
    column = n // PART * (SLOTS * PART) + n % PART
    return begins, (row * (SLOTS * N) + slot * PART)[:, None] + column[None, :]


@triton.jit
def row_steps(x, begins, inside, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the step size of each row: absmax / 127, or 1 if that is 0."""
    k = tl.arange(0, BLOCK_K)
    largest = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        mask = inside[:, None] & (start + k < K)[None, :]
        part = tl.load(x + begins[:, None] + start + k[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
    step = tl.div_rn(largest, 127.0)
    return tl.where(step == 0.0, 1.0, step)


@triton.jit
def floats(
    x,  # f32 [rows, K], or [rows, SLOTS·K] if OWN; row stride X_STRIDE
    chosen,  # i32 [rows, SLOTS]
    order,  # i32 [rows, SLOTS]
    weight,  # f32 or f16 [E, N, K]
    y,  # f32 [rows, SLOTS·N]
    P,  # rows · SLOTS
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    OWN: tl.constexpr,
    PARTS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,  # entries of `chosen` read at a time
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first, count = span(chosen, tl.program_id(0), P, PAIRS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight += (tl.program_id(0).to(tl.int64) * N + n)[None, :] * K + k[:, None]
    for tile in range(0, count, BLOCK_M):
        m = tile + tl.arange(0, BLOCK_M)
        begins, to = places(order, first, m, count, n, N, K, SLOTS, OWN, PARTS, X_STRIDE)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            rows, columns = (m < count)[:, None], (n < N)[None, :]
            if K % BLOCK_K:
                rows &= (start + k < K)[None, :]
                columns &= (start + k < K)[:, None]
            w = tl.load(weight + start, mask=columns, other=0.0)
            of_x = tl.load(x + begins[:, None] + start + k[None, :], mask=rows, other=0.0)
            if w.dtype == tl.float16:
                of_x = to_half(of_x)
            total = dot_float(of_x, w, total)
        tl.store(y + to, total, mask=(m < count)[:, None] & (n < N)[None, :])


@triton.jit
def int8(
    x,  # as for `floats`; each row is quantized by its absmax
    chosen,
    order,
    weight,  # i8 [E, N, K]
    weight_scale,  # f32 [E, N]
    y,
    P,
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    OWN: tl.constexpr,
    PARTS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    first, count = span(chosen, tl.program_id(0), P, PAIRS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = tl.program_id(0).to(tl.int64) * N + n
    weight += at[None, :] * K + k[:, None]
    for tile in range(0, count, BLOCK_M):
        m = tile + tl.arange(0, BLOCK_M)
        begins, to = places(order, first, m, count, n, N, K, SLOTS, OWN, PARTS, X_STRIDE)
        step = row_steps(x, begins, m < count, K, BLOCK_M, BLOCK_K)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for start in range(0, K, BLOCK_K):
            rows, columns = (m < count)[:, None], (n < N)[None, :]
            if K % BLOCK_K:
                rows &= (start + k < K)[None, :]
                columns &= (start + k < K)[:, None]
            w = tl.load(weight + start, mask=columns, other=0)
            of_x = tl.load(x + begins[:, None] + start + k[None, :], mask=rows, other=0.0)
            total = dot_int8(round8(tl.div_rn(of_x, step[:, None])), w, total)
        unit = tl.load(weight_scale + at, mask=n < N, other=0.0)
        out = total.to(tl.float32) * (step[:, None] * unit[None, :])
        tl.store(y + to, out, mask=(m < count)[:, None] & (n < N)[None, :])


@triton.jit
def bits(
    x,  # as for `floats`
    chosen,
    order,
    packed,  # u8 [E, N, K·BITS/8]
    scales,  # f32 or f16 [E, N, K/SHARED]
    y,
    P,
    N: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    OWN: tl.constexpr,
    PARTS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns that share a scale
    WHOLE: tl.constexpr,  # quantize each row to int8 by its absmax
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a power of two, at least SHARED
    minimums=None,  # like scales: the value of quant 0; None: the middle quant is 0
):
    first, count = span(chosen, tl.program_id(0), P, PAIRS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = SHARED * BITS // 8
    j = tl.arange(0, BLOCK_K * BITS // 8)
    at = tl.program_id(0).to(tl.int64) * N + n
    packed += at[None, :] * (K * BITS // 8) + j[:, None]
    scales += at * (K // SHARED)
    BASE: tl.constexpr = 1024.0 + ((8 if BITS == 4 else 128) if minimums is None else 0)
    if minimums is not None:
        minimums += at * (K // SHARED)
    columns = (n < N)[None, :] & (j < BYTES)[:, None]
    for tile in range(0, count, BLOCK_M):
        m = tile + tl.arange(0, BLOCK_M)
        begins, to = places(order, first, m, count, n, N, K, SLOTS, OWN, PARTS, X_STRIDE)
        rows = (m < count)[:, None] & (j < BYTES)[None, :]
        step = tl.full([BLOCK_M], 1.0, tl.float32)
        if WHOLE:
            step = row_steps(x, begins, m < count, K, BLOCK_M, BLOCK_K)
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        total = zeros
        for block in range(0, K // SHARED):
            w = tl.load(packed + block * BYTES, mask=columns, other=0)
            unit = tl.load(scales + block, mask=n < N, other=0.0)
            of_x = x + begins[:, None] + block * SHARED
            if BITS == 4:
                even = grid(tl.load(of_x + 2 * j[None, :], mask=rows, other=0.0), step, WHOLE)
                odd = grid(tl.load(of_x + 2 * j[None, :] + 1, mask=rows, other=0.0), step, WHOLE)
                low, high = halves_of_nibbles(w)
                sums = dot_float(even, low - BASE, zeros)
                sums = dot_float(odd, high - BASE, sums)
            else:
                all_x = grid(tl.load(of_x + j[None, :], mask=rows, other=0.0), step, WHOLE)
                sums = dot_float(all_x, halves_of(w) - BASE, zeros)
            total += sums * unit[None, :]
            if minimums is not None:
                least = tl.load(minimums + block, mask=n < N, other=0.0).to(tl.float32)
                in_block = tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=1)
                total += least[None, :] * in_block[:, None]
        if WHOLE:
            total = total * step[:, None]
        tl.store(y + to, total, mask=(m < count)[:, None] & (n < N)[None, :])


@triton.jit
def grid(x, step, WHOLE: tl.constexpr):
    """Return x as f16: in whole steps if WHOLE, which keeps sums exact, else x itself."""
    if WHOLE:
        return round8(tl.div_rn(x, step[:, None])).to(tl.float16)
    else:
        return to_half(x)
