"""fp32 rows times fp32 or fp16 weights, summed in fp32.

fp16 weights are multiplied by x rounded to fp16, because tensor cores do not mix types; values that
would overflow become the largest fp16 value, and NaN stays NaN. fp32 weights are multiplied as
three tf32 products, which together are as accurate as fp32 ones.

`few` and `many` divide the work as in `linear_int8`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import tensor_cores
from edge.plugins.kernels.direct import compiled, rounded_half


@triton.jit
def to_half(x):
    """Round x from f32 to f16, clipped to ±65504."""
    if compiled() and tensor_cores():
        half = rounded_half(x)
    else:
        low = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
        high = tl.minimum(low, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        half = high.to(tl.float16)
    return half


@triton.jit
def dot_float(a, b, total):
    """Return total + a · b for f16 or f32 operands, summed in f32."""
    if tensor_cores():
        return tl.dot(a, b, total, input_precision="tf32x3")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def few(
    x,  # f32 [M, K], row stride X_STRIDE; M is at most 16
    weight,  # f32 or f16 [N, K]
    y,  # f32 [M, N]
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16, at least M
    BLOCK_N: tl.constexpr,  # 16 per warp
    BLOCK_K: tl.constexpr,
):
    m = tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = few_float(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K)
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def few_float(
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
):
    """Return Σ_k x[m, k] · weight[n, k], f32 [ROWS, BLOCK_N], zero out of bounds."""
    STEP: tl.constexpr = BLOCK_K if tensor_cores() else 32
    k = tl.arange(0, STEP)
    x += m[None, :] * X_STRIDE + k[:, None]
    weight += n.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, K, STEP):
        rows, columns = (m < M)[None, :], (n < N)[:, None]
        if K % STEP:
            rows &= (start + k < K)[:, None]
            columns &= (start + k < K)[None, :]
        w = tl.load(weight + start, mask=columns, other=0.0)
        of_x = tl.load(x + start, mask=rows, other=0.0)
        if w.dtype == tl.float16:
            of_x = to_half(of_x)
        total = dot_float(w, of_x, total)
    return tl.trans(total)


@triton.jit
def many(
    x,  # as for `few`; any M
    weight,
    y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Adjacent programs share weights: a chunk of rows fits in L2, so weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    STEP: tl.constexpr = BLOCK_K if tensor_cores() else 8
    k = tl.arange(0, STEP)
    x += m.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
    weight += n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, STEP):
        rows, columns = (m < M)[:, None], (n < N)[None, :]
        if K % STEP:
            rows &= (start + k < K)[None, :]
            columns &= (start + k < K)[:, None]
        w = tl.load(weight + start, mask=columns, other=0.0)
        of_x = tl.load(x + start, mask=rows, other=0.0)
        if w.dtype == tl.float16:
            of_x = to_half(of_x)
        total = dot_float(of_x, w, total)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, total, mask=(m < M)[:, None] & (n < N)[None, :])
