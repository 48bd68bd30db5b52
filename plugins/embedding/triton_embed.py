"""Embedding lookups as fp32, from tables of floats, scaled int8, or blocks of 8 or 4 bits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embed(
    tokens,  # i32 [T·B]
    table,  # f32, f16 or i8 [V, D]
    scale,  # f32 [1] or [V] for an int8 table (SCALE_STEP 0 or 1), else None
    y,  # f32 [T·B, D]
    D: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(table + token * D + k, mask=k < D, other=0).to(tl.float32)
    if scale is not None:
        value *= tl.load(scale + token * SCALE_STEP)
    tl.store(y + row * D + k, value, mask=k < D)


@triton.jit
def embed_bits(
    tokens,  # i32 [T·B]
    packed,  # u8 [V, D·BITS/8], zero point 2^(BITS-1); 4 bits: low nibble is the even column
    scales,  # f32 [V, D/SHARED]
    y,  # f32 [T·B, D]
    D: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns that share a scale
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(tokens + row).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if BITS == 4:
        pair = tl.load(packed + token * (D // 2) + k // 2, mask=k < D, other=0).to(tl.int32)
        quant = ((pair >> (k % 2 * 4)) & 15) - 8
    else:
        quant = tl.load(packed + token * D + k, mask=k < D, other=0).to(tl.int32) - 128
    unit = tl.load(scales + token * (D // SHARED) + k // SHARED, mask=k < D, other=0.0)
    tl.store(y + row * D + k, quant.to(tl.float32) * unit, mask=k < D)
