"""Elementwise GELU, exact or with the tanh approximation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import sigmoid


@triton.jit
def gelu(
    x,  # f32 [rows, X_STRIDE]
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TANH: tl.constexpr,  # use the tanh approximation
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    if TANH:
        # (1 + tanh(u)) / 2 = sigmoid(2u); the first constant is 2·√(2/π)
        out = value * sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        out = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(y + row * WIDTH + channel, out, mask=inside)
