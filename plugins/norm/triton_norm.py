"""RMSNorm and LayerNorm of a value or a sum, with or without quantization: one program per row."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8


@triton.jit
def norm(
    x,  # f32 [rows, X_STRIDE]
    added,  # f32 [rows, ADDED_STRIDE] or None
    weight,  # f32 [WIDTH]
    bias,  # f32 [WIDTH] or None
    scale,  # f32 [SCALES], 1 or WIDTH; None: y is not quantized
    rows,  # i32 [L] or None: row l·B+b of y comes from row rows[l]·B+b of x and added
    y,  # f32 or i8 [rows or L·B, WIDTH]
    total,  # f32 [rows or L·B, WIDTH] or None: x + added
    B,  # sequences, or None without `rows`
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    X_STRIDE: tl.constexpr,
    ADDED_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    CENTERED: tl.constexpr,  # LayerNorm if true, RMSNorm otherwise
    EPS: tl.constexpr,
):
    row = tl.program_id(0)
    source = row
    if rows is not None:
        source = tl.load(rows + row // B) * B + row % B
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    h = tl.load(x + source * X_STRIDE + channel, mask=inside, other=0.0)
    if added is not None:
        h += tl.load(added + source * ADDED_STRIDE + channel, mask=inside, other=0.0)
        if total is not None:
            tl.store(total + row * WIDTH + channel, h, mask=inside)
    # Loaded before the sums, which need all of x: the three loads then cost one wait, not three.
    gain = tl.load(weight + channel, mask=inside, other=0.0)
    if bias is not None:
        shift = tl.load(bias + channel, mask=inside, other=0.0)
    if scale is not None:
        step = tl.load(scale + channel, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
    if CENTERED:
        h = tl.where(inside, h - tl.sum(h, 0) / WIDTH, 0.0)
    spread = tl.sqrt_rn(tl.sum(h * h, 0) / WIDTH + EPS)
    out = gain * (h * tl.div_rn(1.0, spread))
    if bias is not None:
        out += shift
    if scale is not None:
        out = round8(tl.div_rn(out, step))
    tl.store(y + row * WIDTH + channel, out, mask=inside)
