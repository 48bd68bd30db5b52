"""Sums of rows, columns picked by index, rows picked by index, and concatenated rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(
    a,  # f32 [rows, A_STRIDE]
    b,  # f32 [rows, B_STRIDE]; B_STRIDE 0: the same [WIDTH] for every row
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    left = tl.load(a + row * A_STRIDE + channel, mask=inside)
    right = tl.load(b + row * B_STRIDE + channel, mask=inside)
    tl.store(y + row * WIDTH + channel, left + right, mask=inside)


@triton.jit
def gather_columns(
    x,  # [rows, X_STRIDE]
    columns,  # i32 or i64 [WIDTH], in [0, X_STRIDE)
    y,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    column = tl.load(columns + channel, mask=inside, other=0)
    value = tl.load(x + row * X_STRIDE + column, mask=inside)
    tl.store(y + row * WIDTH + channel, value, mask=inside)


@triton.jit
def gather_rows(
    x,  # [T·B, X_STRIDE]
    rows,  # i32 [L]: row l·B+b of y is row rows[l]·B+b of x
    y,  # [L·B, WIDTH]
    B,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    source = tl.load(rows + row // B) * B + row % B
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + source * X_STRIDE + channel, mask=inside)
    tl.store(y + row * WIDTH + channel, value, mask=inside)


@triton.jit
def concat(
    a,  # [rows, A_STRIDE]
    b,  # [rows, B_STRIDE]
    y,  # [rows, A_WIDTH + B_WIDTH]
    A_WIDTH: tl.constexpr,
    B_WIDTH: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = channel < A_WIDTH
    width: tl.constexpr = A_WIDTH + B_WIDTH
    inside = channel < width
    left = tl.load(a + row * A_STRIDE + channel, mask=first)
    right = tl.load(b + row * B_STRIDE + channel - A_WIDTH, mask=inside & (channel >= A_WIDTH))
    tl.store(y + row * width + channel, tl.where(first, left, right), mask=inside)
