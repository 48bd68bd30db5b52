"""int8 rows times int8 weights with exact sums, scaled to fp32 or quantized to int8 again.

`few` is for at most 16 rows and bound by reading the weights. Tensor cores multiply 8 or 16 rows
for the price of one. The weights are their left operand, whose rows are divided among the warps, so
each is read from shared memory once. `many` is the usual tiled product.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8, tensor_cores


@triton.jit
def dot_int8(x, w, total):
    """Return total + x · w, exact. x i8 [M, K], w i8 [K, N], total i32 [M, N].

    Without tensor cores (sm_75, where Triton 3.9 does not use them) products are fp32. They are
    exact up to K = 1024: that many products of int8 values sum to at most 2²⁴.
    """
    if tensor_cores():
        return tl.dot(x, w, total, out_dtype=tl.int32)
    else:
        products = tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee")
        return total + products.to(tl.int32)


@triton.jit
def scaled(
    total,  # sums, i32 or f32 [BLOCK_M, BLOCK_N]
    m,  # row indices
    n,  # column indices
    x_scale,
    weight_scale,  # or None
    y_scale,
    M,
    N: tl.constexpr,
    X_SCALE_STEP: tl.constexpr,
    WEIGHT_SCALE_STEP: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
):
    """Scale the sums to f32; with a y_scale, divide by it and round to int8."""
    of_x = tl.load(x_scale + m * X_SCALE_STEP, mask=m < M, other=1.0)
    unit = of_x[:, None]
    if weight_scale is not None:
        unit *= tl.load(weight_scale + n * WEIGHT_SCALE_STEP, mask=n < N, other=1.0)[None, :]
    y = total.to(tl.float32) * unit
    if y_scale is not None:
        y = round8(
            tl.div_rn(y, tl.load(y_scale + n * Y_SCALE_STEP, mask=n < N, other=1.0)[None, :])
        )
    return y


@triton.jit
def few(
    x,  # i8 [M, K], row stride X_STRIDE; M is at most 16
    x_scale,  # f32 [1] or [M] (X_SCALE_STEP 0 or 1)
    weight,  # i8 [N, K]
    weight_scale,  # f32 [1] or [N] (WEIGHT_SCALE_STEP 0 or 1)
    y_scale,  # f32 [1] or [N]; None: y is f32
    y,  # i8 or f32 [M, N]
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALE_STEP: tl.constexpr,
    WEIGHT_SCALE_STEP: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16, at least M
    BLOCK_N: tl.constexpr,  # 16, or 16 per warp
    BLOCK_K: tl.constexpr,  # columns per step
    SPLIT: tl.constexpr = 1,  # parts of K summed in parallel by the warps
):
    m = tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = few_int8(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K, SPLIT)
    out = scaled(
        total, m, n, x_scale, weight_scale, y_scale, M, N,
        X_SCALE_STEP, WEIGHT_SCALE_STEP, Y_SCALE_STEP,
    )  # fmt: skip
    tl.store(y + m[:, None] * N + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def few_int8(
    x,
    weight,
    m,
    n,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr = 1,
):
    """Return Σ_k x[m, k] · weight[n, k], i32 [ROWS, BLOCK_N], zero out of bounds."""
    if SPLIT > 1 and tensor_cores():
        total = few_int8_split(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K, SPLIT)
    else:
        total = few_int8_whole(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K)
    return tl.trans(total)


@triton.jit
def few_int8_whole(
    x, weight, m, n, M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums, i32 [BLOCK_N, ROWS], accumulated in column order."""
    # Two products per step: with one, sm_8x prefetches the first operand byte by byte.
    STEP: tl.constexpr = BLOCK_K // 2 if tensor_cores() else 32
    k = tl.arange(0, STEP)
    x += m[None, :] * X_STRIDE + k[:, None]
    weight += n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_N, ROWS], tl.int32)
    for start in range(0, K, 2 * STEP):
        for half in tl.static_range(2):
            first = start + half * STEP
            rows, columns = (m < M)[None, :], (n < N)[:, None]
            if K % (2 * STEP):
                rows &= (first + k < K)[:, None]
                columns &= (first + k < K)[None, :]
            total = dot_int8(
                tl.load(weight + first, mask=columns, other=0),
                tl.load(x + first, mask=rows, other=0),
                total,
            )
    return total


@triton.jit
def few_int8_split(
    x, weight, m, n, M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Return the sums, i32 [BLOCK_N, ROWS], of SPLIT parts of the columns, computed in parallel.

    In sequence, 5120 columns are 160 dependent tensor-core products, and a warp waits for each.
    Integer sums are exact in any order.
    """
    PART: tl.constexpr = K // SPLIT
    STEP: tl.constexpr = BLOCK_K // SPLIT
    s, k = tl.arange(0, SPLIT), tl.arange(0, STEP)
    x += m[None, None, :] * X_STRIDE + s[:, None, None] * PART + k[None, :, None]
    weight += n.to(tl.int64)[None, :, None] * K + s[:, None, None] * PART + k[None, None, :]
    total = tl.zeros([SPLIT, BLOCK_N, ROWS], tl.int32)
    for start in range(0, PART, STEP):
        rows, columns = (m < M)[None, None, :], (n < N)[None, :, None]
        if PART % STEP:
            rows &= (start + k < PART)[None, :, None]
            columns &= (start + k < PART)[None, None, :]
        total = dot_int8(
            tl.load(weight + start, mask=columns, other=0),
            tl.load(x + start, mask=rows, other=0),
            total,
        )
    return tl.sum(total, 0)


@triton.jit
def many(
    x,  # as for `few`; any M
    x_scale,
    weight,
    weight_scale,
    y_scale,
    y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALE_STEP: tl.constexpr,
    WEIGHT_SCALE_STEP: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Adjacent programs share weights: a chunk of rows fits in L2, so weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Two products per step, as in few_int8; without tensor cores the operands are in registers.
    STEP: tl.constexpr = BLOCK_K // 2 if tensor_cores() else 8
    k = tl.arange(0, STEP)
    x += m.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    weight += n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start in range(0, K, 2 * STEP):
        for half in tl.static_range(2):
            first = start + half * STEP
            rows, columns = (m < M)[:, None], (n < N)[None, :]
            if K % (2 * STEP):
                rows &= (first + k < K)[None, :]
                columns &= (first + k < K)[:, None]
            total = dot_int8(
                tl.load(x + first, mask=rows, other=0),
                tl.load(weight + first, mask=columns, other=0),
                total,
            )
    out = scaled(
        total, m, n, x_scale, weight_scale, y_scale, M, N,
        X_SCALE_STEP, WEIGHT_SCALE_STEP, Y_SCALE_STEP,
    )  # fmt: skip
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, out, mask=(m < M)[:, None] & (n < N)[None, :])
