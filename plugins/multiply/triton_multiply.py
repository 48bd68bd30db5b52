"""Elementwise product of two values."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import pair_of


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
    left, right, at, inside = pair_of(x, z, WIDTH, BLOCK, X_STRIDE, Z_STRIDE)
    tl.store(y + at, left * right, mask=inside)
