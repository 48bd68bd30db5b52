"""Elementwise squared ReLU."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squared_relu(
    x,  # f32 [rows, X_STRIDE]
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    # NaN stays NaN, as in ONNX
    positive = tl.where(value < 0.0, 0.0, value)
    tl.store(y + row * WIDTH + channel, positive * positive, mask=inside)
