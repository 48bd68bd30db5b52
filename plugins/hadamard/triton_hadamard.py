"""Rotation of rows by slow ⊗ fastᵀ, with or without quantization to int8."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8
from edge.plugins.kernels.products import LEFT, RIGHT, dot


@triton.jit
def hadamard(
    x,  # f32 [rows, X_STRIDE], a row is X [P, Q]
    slow,  # f32 [P, P]
    fast,  # f32 [Q, Q]
    scale,  # f32 [SCALES], 1 or P·Q; None: y is not quantized
    y,  # f32 or i8 [rows, P·Q]
    P: tl.constexpr,
    Q: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_P: tl.constexpr,  # rows of slow·X·fast per program
    BLOCK_K: tl.constexpr,  # rows of X at a time
    BLOCK_Q: tl.constexpr,  # a power of two, at least Q
    UNIT: tl.constexpr = 0.0,  # slow has only 0 and ±UNIT; 0: any values
    SHORT: tl.constexpr = False,  # whether tf32 holds fast without rounding
):
    """Compute rows `out` of (slow · X) · fast; no work is repeated for any block size."""
    row = tl.program_id(0)
    out = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    column = tl.arange(0, BLOCK_Q)
    here = (column < Q)[None, :]
    turn = tl.load(
        fast + column[:, None] * Q + column[None, :], mask=here & (column < Q)[:, None], other=0.0
    )
    mixed = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    for start in range(0, P, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        some = tl.load(slow + out * P + k[None, :], mask=(out < P) & (k < P)[None, :], other=0.0)
        at = k[:, None] * Q + column[None, :]
        grid = tl.load(x + row * X_STRIDE + at, mask=(k < P)[:, None] & here, other=0.0)
        if UNIT > 0:
            some = tl.where(some > 0, 1.0, tl.where(some < 0, -1.0, 0.0))
        mixed = dot(some, grid, mixed, LEFT if UNIT > 0 else 0)
    if UNIT > 0:
        mixed = mixed * UNIT
    rotated = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    rotated = dot(mixed, turn, rotated, RIGHT if SHORT else 0)
    at = out * Q + column[None, :]
    inside = (out < P) & here
    if scale is not None:
        step = tl.load(scale + at, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
        rotated = round8(tl.div_rn(rotated, step))
    tl.store(y + row * (P * Q) + at, rotated, mask=inside)
