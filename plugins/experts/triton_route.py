"""Routing, the order of pairs by expert, and the weighted sum of the experts' outputs."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import sigmoid


@triton.jit
def route(
    logits,  # f32 [rows, E], row stride STRIDE
    bias,  # f32 [E]
    chosen,  # i32 [rows, SLOTS]
    gates,  # f32 [rows, SLOTS]
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least E
):
    row = tl.program_id(0)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + row * STRIDE + e, mask=e < E, other=float("-inf"))
    if SIGMOID:
        score = sigmoid(x)
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    low = float("-inf")
    ranked = tl.where(e < E, score + tl.load(bias + e, mask=e < E, other=0.0), low)
    # NaN ranks last, yet above -inf, which marks an expert already chosen
    ranked = tl.where(ranked == ranked, ranked, -3.0e38)
    if GROUPS > 1:
        ranked = best_groups(ranked, e, E // GROUPS, GROUPS, TOP_GROUPS)
    total = 0.0
    free = ranked
    for _ in tl.static_range(SLOTS):
        best = first_largest(free, e, BLOCK)
        total += tl.sum(tl.where(e == best, score, 0.0), 0)
        free = tl.where(e == best, low, free)
    factor = SCALE / total if NORMALISE else SCALE
    for slot in tl.static_range(SLOTS):
        best = first_largest(ranked, e, BLOCK)
        ranked = tl.where(e == best, low, ranked)
        tl.store(chosen + row * SLOTS + slot, best)
        tl.store(gates + row * SLOTS + slot, tl.sum(tl.where(e == best, score, 0.0), 0) * factor)


@triton.jit
def first_largest(x, e, BLOCK: tl.constexpr):
    """Return the index of the largest value, the first if several are equal."""
    return tl.min(tl.where(x == tl.max(x, 0), e, BLOCK - 1), 0)


@triton.jit
def best_groups(ranked, e, MEMBERS: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr):
    """Keep the TOP groups by the sum of their two largest values; set the others to -inf."""
    low = float("-inf")
    worth = tl.full(ranked.shape, low, tl.float32)  # element g: score of group g
    for group in tl.static_range(GROUPS):
        inside = tl.where(e // MEMBERS == group, ranked, low)
        best = tl.max(inside, 0)
        if MEMBERS > 1:
            first = tl.min(tl.where(inside == best, e, 1 << 30), 0)
            best += tl.max(tl.where(e == first, low, inside), 0)
        worth = tl.where(e == group, best, worth)
    closed = ranked
    for group in tl.static_range(GROUPS):
        own = tl.max(tl.where(e == group, worth, low), 0)
        ahead = (worth > own) | ((worth == own) & (e < group))
        count = tl.sum((ahead & (e < GROUPS)).to(tl.int32), 0)
        closed = tl.where((e // MEMBERS == group) & (count >= TOP), low, closed)
    return closed


@triton.jit
def order(
    chosen,  # i32 [P]
    order,  # i32 [P]
    P,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the pairs of this program's expert."""
    expert = tl.program_id(0)
    place, _ = span(chosen, expert, P, BLOCK)
    for start in range(0, P, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        here = (tl.load(chosen + pair, mask=pair < P, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(here, 0) - 1, pair, mask=here > 0)
        place += tl.sum(here, 0)


@triton.jit
def span(chosen, expert, P, BLOCK: tl.constexpr):
    """Return where an expert's pairs start in `order`, and their number."""
    before = 0
    count = 0
    for start in range(0, P, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        one = tl.load(chosen + pair, mask=pair < P, other=1 << 30)
        before += tl.sum((one < expert).to(tl.int32), 0)
        count += tl.sum((one == expert).to(tl.int32), 0)
    return before, count


@triton.jit
def weigh(
    x,  # f32 [rows, SLOTS·N], row stride X_STRIDE
    gates,  # f32 [rows, SLOTS]
    y,  # f32 [rows, N]
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SLOTS):
        gate = tl.load(gates + row * SLOTS + slot)
        total += gate * tl.load(x + row * X_STRIDE + slot * N + n, mask=n < N, other=0.0)
    tl.store(y + row * N + n, total, mask=n < N)
