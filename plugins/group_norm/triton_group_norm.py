"""RMSNorm of adjacent values: several groups a program, or one of three parts."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_norm(
    x,  # f32 [rows, X_STRIDE]
    weight,  # f32 [GROUPS·WIDTH]
    y,  # f32 [rows, GROUPS·WIDTH]
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # values of a group, which share a mean square
    X_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_G: tl.constexpr,  # groups per program
    BLOCK_W: tl.constexpr,  # a power of two, at least WIDTH
):
    row = tl.program_id(0)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    inside = (group < GROUPS) & (column < WIDTH)
    place = group * WIDTH + column
    gain = tl.load(weight + place, mask=inside, other=0.0)
    value = tl.load(x + row * X_STRIDE + place, mask=inside, other=0.0)
    spread = tl.sqrt_rn(tl.sum(value * value, 1) / WIDTH + EPS)
    out = gain * (value * tl.div_rn(1.0, spread)[:, None])
    tl.store(y + row * (GROUPS * WIDTH) + place, out, mask=inside)


@triton.jit
def parts_norm(
    x,  # f32 [rows, X_STRIDE]
    weight,  # f32 [FIRST + 2·HALF]
    y,  # f32 [rows, FIRST + 2·HALF]
    FIRST: tl.constexpr,  # values of the first part
    HALF: tl.constexpr,  # values of the second and of the third part
    X_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least FIRST and HALF
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    width = tl.where(part == 0, FIRST, HALF)
    start = tl.where(part == 0, 0, FIRST + (part - 1) * HALF)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + start + column, mask=inside, other=0.0)
    value = tl.load(x + row * X_STRIDE + start + column, mask=inside, other=0.0)
    spread = tl.sqrt_rn(tl.sum(value * value, 0) / width + EPS)
    out = gain * (value * tl.div_rn(1.0, spread))
    tl.store(y + row * (FIRST + 2 * HALF) + start + column, out, mask=inside)
