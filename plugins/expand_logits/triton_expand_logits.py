"""Logits of few ids in the places of all."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expand(
    x,  # f32 [rows, X_STRIDE]
    index,  # i32 [WIDTH]
    y,  # f32 [rows, WIDTH]
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK ids of a row. Every program finds the smallest of x, which L2 holds."""
    row = tl.program_id(0)
    x += row * X_STRIDE
    smallest = tl.full([BLOCK_K], float("inf"), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        smallest = tl.minimum(smallest, tl.load(x + k, mask=k < K, other=float("inf")))
    least = tl.min(smallest, 0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(index + v, mask=v < WIDTH, other=-1)
    listed = (column >= 0) & (column < K)
    value = tl.load(x + column, mask=listed, other=0.0)
    tl.store(y + row * WIDTH + v, tl.where(listed, value, least), mask=v < WIDTH)
