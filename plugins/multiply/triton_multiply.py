"""The product of two values, number by number."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    x,  # f32 [rows, X_STRIDE]
    z,  # f32 [rows, Z_STRIDE]
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    left = tl.load(x + row * X_STRIDE + channel, mask=inside)
    right = tl.load(z + row * Z_STRIDE + channel, mask=inside)
    tl.store(y + row * WIDTH + channel, left * right, mask=inside)
