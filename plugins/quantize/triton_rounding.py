"""Quantization to int8 and back, by known scales (one block of channels a program) or by row."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8


@triton.jit
def quantize(
    x,  # f32 [rows, X_STRIDE]
    scale,  # f32 [SCALES], 1 or WIDTH
    y,  # i8 [rows, WIDTH], or f32 if BACK
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BACK: tl.constexpr,  # dequantize the result
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    step = tl.load(scale + channel, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
    out = round8(tl.div_rn(value, step))
    if BACK:
        out = step * out.to(tl.float32)
    tl.store(y + row * WIDTH + channel, out, mask=inside)


@triton.jit
def dequantize(
    x,  # i8 [rows, X_STRIDE]
    scale,  # f32 [SCALES], 1 or WIDTH
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0).to(tl.float32)
    step = tl.load(scale + channel, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
    tl.store(y + row * WIDTH + channel, step * value, mask=inside)


@triton.jit
def quantize_rows(
    x,  # f32 [rows, X_STRIDE]
    scale,  # f32 [rows] or None: absmax/127 of each row, 1 if that is 0
    y,  # i8 [rows, WIDTH], or f32 if BACK
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BACK: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    step = tl.div_rn(tl.max(tl.abs(value), 0), 127.0)
    step = tl.where(step == 0.0, 1.0, step)
    if scale is not None:
        tl.store(scale + row, step)
    out = round8(tl.div_rn(value, step))
    if BACK:
        out = step * out.to(tl.float32)
    tl.store(y + row * WIDTH + channel, out, mask=inside)


@triton.jit
def split_quantize_rows(
    x,  # f32 [rows, X_STRIDE]
    scale,  # f32 [rows]: absmax/127 of the quantized values, 1 if that is 0
    y,  # i8 [rows, WIDTH]
    outliers,  # f32 [rows, WIDTH]: x if |x| ≥ THRESHOLD, else 0
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    THRESHOLD: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    inside = channel < WIDTH
    value = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    large = tl.abs(value) >= THRESHOLD
    small = tl.where(large, 0.0, value)
    step = tl.div_rn(tl.max(tl.abs(small), 0), 127.0)
    step = tl.where(step == 0.0, 1.0, step)
    tl.store(scale + row, step)
    tl.store(y + row * WIDTH + channel, round8(tl.div_rn(small, step)), mask=inside)
    tl.store(outliers + row * WIDTH + channel, tl.where(large, value, 0.0), mask=inside)
