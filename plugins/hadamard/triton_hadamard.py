"""Rotation of rows by slow ⊗ fastᵀ, with or without quantization to int8."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8


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
        mixed = tl.dot(some, grid, mixed, input_precision="tf32x3")
    rotated = tl.dot(mixed, turn, input_precision="tf32x3")
    at = out * Q + column[None, :]
    inside = (out < P) & here
    if scale is not None:
        step = tl.load(scale + at, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
        rotated = round8(tl.div_rn(rotated, step))
    tl.store(y + row * (P * Q) + at, rotated, mask=inside)
