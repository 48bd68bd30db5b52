"""Rotary embedding of queries and keys, and the append of keys and values to their caches."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge import launch

PAST = tl.constexpr(launch.PAST)


@triton.jit
def _pair(x, first, second, column, HALF: tl.constexpr):
    """Load x[column] where `first`, x[column - HALF] where `second`, as two contiguous loads."""
    early = tl.load(x + column, mask=first, other=0.0)
    late = tl.load(x + column - HALF, mask=second, other=0.0)
    return tl.where(first, early, late)


@triton.jit
def _turned(x, place, column, inside, cos, sin, DIM: tl.constexpr):
    """Load heads x[place]; if DIM > 0, rotate them by the token's angles (cos, sin f32 [DIM/2])."""
    value = tl.load(x + place, mask=inside, other=0.0)
    if DIM > 0:
        half: tl.constexpr = DIM // 2
        # as wide as the heads: otherwise cos and sin get another layout and go via shared memory
        first = inside & (column < half)
        second = inside & (column >= half) & (column < DIM)
        other = _pair(x + half, first, second, place, DIM)
        c = _pair(cos, first, second, column, half)
        s = _pair(sin, first, second, column, half)
        turned = value * c + tl.where(first, -other, other) * s
        value = tl.where(column < DIM, turned, value)
    return value


@triton.jit
def append(
    q,  # f32 [T·B, Q_STRIDE]: heads of P values; None where DIM is 0
    k,  # f32 [T·B, K_STRIDE]
    v,  # f32 [T·B, V_STRIDE]
    cos,  # f32 [T, DIM/2], or None
    sin,
    run,  # i32, RUN_FIELDS
    turned,  # f32 [T·B, HEADS·P]: q rotated, or None
    keys,  # f32 or f16 [B, KV, C, P]: slot PAST+t gets k[t·B+b], rotated
    values,  # the same for v
    B,
    C,
    HEADS: tl.constexpr,  # query heads; 0 without q
    KV: tl.constexpr,
    P: tl.constexpr,
    DIM: tl.constexpr,  # the first DIM values of a head are rotated
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_P: tl.constexpr,  # a power of two, at least P
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    t = row // B
    column = tl.arange(0, BLOCK_P)[None, :]
    near = tl.arange(0, BLOCK_H)[:, None]
    if DIM > 0:
        cos += t * (DIM // 2)
        sin += t * (DIM // 2)
    # programs of a row: ceil(HEADS / BLOCK_H) for q, then ceil(KV / BLOCK_H) each for k and for v
    q_parts: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    kv_parts: tl.constexpr = (KV + BLOCK_H - 1) // BLOCK_H
    if part < q_parts:
        if q is not None:
            head = part * BLOCK_H + near
            inside = (head < HEADS) & (column < P)
            place = head * P + column
            out = _turned(q + row * Q_STRIDE, place, column, inside, cos, sin, DIM)
            tl.store(turned + row * (HEADS * P) + place, out, mask=inside)
    else:
        part -= q_parts
        slot = tl.load(run + PAST) + t
        head = (part % kv_parts) * BLOCK_H + near
        inside = (head < KV) & (column < P)
        place = head * P + column
        to = (((row % B) * KV + head).to(tl.int64) * C + slot) * P + column
        if part < kv_parts:
            out = _turned(k + row * K_STRIDE, place, column, inside, cos, sin, DIM)
            tl.store(keys + to, out, mask=inside)
        else:
            out = tl.load(v + row * V_STRIDE + place, mask=inside)
            tl.store(values + to, out, mask=inside)
