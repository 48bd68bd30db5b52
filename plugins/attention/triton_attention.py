"""Attention over KV caches that already hold this run's keys and values.

The queries of one KV head are rows r = t·GROUP + g: token t, query head kv·GROUP + g. A program
takes BLOCK_R of them over some slots of the cache, a tile of BLOCK_N slots at a time. It keeps a
running softmax: the largest score so far, the sum of exponentials relative to it, and their mix of
values (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135, algorithm 1).
Scores and mixes are fp32: products are three passes of tf32, or plain fp32 for a single row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge import launch
from edge.plugins.kernels.common import tanh

PAST = tl.constexpr(launch.PAST)


@triton.jit
def _base(past, WINDOW: tl.constexpr):
    """Return the first slot that any token of the run sees."""
    if WINDOW > 0:
        return tl.maximum(past + 1 - WINDOW, 0)
    else:
        return past * 0


@triton.jit
def _first_seen(t, past, T, ancestors, WINDOW: tl.constexpr):
    """Return the first slot that token t sees, i32 [BLOCK_R]. Its window covers the last WINDOW
    slots of the past and of its path. Without `ancestors` the path is the run up to the token.
    """
    if ancestors is None:
        first = past + t + 1 - WINDOW
    else:
        left = t * 0 + WINDOW
        first = t * 0
        for behind in range(T):
            j = T - 1 - behind
            on_path = tl.load(ancestors + t * T + j, mask=t < T, other=0) != 0
            first = tl.where(on_path & (left == 1), past + j, first)
            left -= on_path.to(tl.int32)
        first = tl.where(left > 0, past - left, first)
    return first


@triton.jit
def _visible(slot, t, past, T, ancestors, first, WINDOW: tl.constexpr):
    """Return which slots token t sees, bool [BLOCK_R, BLOCK_N]: all of the past, and the tokens of
    the run up to t (chain) or its ancestors (tree). With a window, nothing before `first`.
    """
    late = slot[None, :] - past
    if ancestors is None:
        sees = late <= t[:, None]
    else:
        mine = (late >= 0) & (late < T) & (t[:, None] < T)
        leads = tl.load(ancestors + t[:, None] * T + late, mask=mine, other=0)
        sees = (late < 0) | (leads != 0)
    if WINDOW > 0:
        sees = sees & (slot[None, :] >= first[:, None])
    return sees


@triton.jit
def _capped(score, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        return SOFTCAP * tanh(score / SOFTCAP)
    else:
        return score


@triton.jit
def _run_over(
    q, keys, values, t, start, end, past, T, ancestors, first_seen,
    P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend with queries q [BLOCK_R, BLOCK_P] to slots start … end-1; no other slot is read.

    Returns (largest score, sum, mix [BLOCK_R, BLOCK_P]); -inf, 0, 0 for a row that sees nothing.
    """
    column = tl.arange(0, BLOCK_P)
    peak = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    mix = tl.zeros((BLOCK_R, BLOCK_P), tl.float32)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_N)
        inside = (slot < end)[:, None] & (column < P)[None, :]
        at = slot[:, None] * P + column[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        score = _capped(tl.dot(q, tl.trans(k), input_precision="tf32x3"), SOFTCAP)
        sees = (slot < end)[None, :] & _visible(slot, t, past, T, ancestors, first_seen, WINDOW)
        score = tl.where(sees, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        level = _finite(higher)
        share = tl.exp(score - level[:, None])
        fade = tl.exp(peak - level)
        total = total * fade + tl.sum(share, 1)
        mix = tl.dot(share, v, mix * fade[:, None], input_precision="tf32x3")
        peak = higher
    return peak, total, mix


@triton.jit
def _finite(peak):
    """Return what to subtract from scores before exp: 0 for -inf, since -inf - -inf is NaN."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _run_alone(
    q, keys, values, start, end,
    P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Compute `_run_over` without `dot`, for the single row q [1, BLOCK_P] of a chain's last token.

    Each of BLOCK_N interleaved sets of slots has its own softmax, so warps synchronize only at the
    end, when these are joined.
    """
    column = tl.arange(0, BLOCK_P)
    peak = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    mix = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    for first in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK_N)
        inside = (slot < end)[:, None] & (column < P)[None, :]
        at = slot[:, None] * P + column[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.where(slot < end, _capped(tl.sum(q * k, 1), SOFTCAP), float("-inf"))
        higher = tl.maximum(peak, score)
        level = _finite(higher)
        share = tl.exp(score - level)
        fade = tl.exp(peak - level)
        total = total * fade + share
        mix = mix * fade[:, None] + share[:, None] * v
        peak = higher
    top = tl.max(peak, 0)
    weight = tl.exp(peak - _finite(top))
    one = tl.zeros((1,), tl.float32)
    all_of_it = tl.sum(total * weight, 0)
    return one + top, one + all_of_it, tl.sum(mix * weight[:, None], 0)[None, :]


@triton.jit
def attend(
    q,  # f32 [T·B, Q_STRIDE]: heads of P values
    keys,  # f32 or f16 [B, KV, C, P]
    values,
    ancestors,  # i32 [T, T], or None: a chain
    run,  # i32, RUN_FIELDS
    y,  # f32 [T·B, KV·GROUP·P], or None where SPLITS > 1
    mixes,  # f32 [T·B, KV·GROUP, SPLITS, P], or None where SPLITS is 1
    peaks,  # f32 [T·B, KV·GROUP, SPLITS, 2]: largest score and sum; or None
    T,
    B,
    C,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    P: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,  # parts of the slots, one program each
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,  # a power of two, at least P
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # number of slots a token sees, its own included; 0: all
    SOFTCAP: tl.constexpr = 0.0,  # soft bound of the scores; 0: none
):
    past = tl.load(run + PAST)
    base = _base(past, WINDOW)
    chunk = part_size(past + T - base, SPLITS, BLOCK_N)
    start = base + tl.program_id(2) * chunk
    if start < past + T:
        # the last tokens see the most slots, so they start first
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        b, kv = tl.program_id(1) // KV, tl.program_id(1) % KV
        r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        t, head = r // GROUP, kv * GROUP + r % GROUP
        column = tl.arange(0, BLOCK_P)
        real = (t < T)[:, None] & (column < P)[None, :]
        row = t * B + b
        at = (row * Q_STRIDE + head * P)[:, None] + column[None, :]
        queries = tl.load(q + at, mask=real, other=0.0) * SCALE
        end = tl.minimum(start + chunk, past + T)
        if ancestors is None:
            end = tl.minimum(end, past + (tile * BLOCK_R + BLOCK_R - 1) // GROUP + 1)
            if WINDOW > 0:
                start = tl.maximum(start, past + tile * BLOCK_R // GROUP + 1 - WINDOW)
        first_seen = t
        if WINDOW > 0:
            first_seen = _first_seen(t, past, T, ancestors, WINDOW)
        cache = tl.program_id(1).to(tl.int64) * C * P
        if BLOCK_R == 1:
            peak, total, mix = _run_alone(
                queries, keys + cache, values + cache, start, end, P, BLOCK_N, BLOCK_P, STAGES,
                SOFTCAP,
            )  # fmt: skip
        else:
            peak, total, mix = _run_over(
                queries, keys + cache, values + cache, t, start, end, past, T, ancestors,
                first_seen, P, BLOCK_R, BLOCK_N, BLOCK_P, STAGES, WINDOW, SOFTCAP,
            )  # fmt: skip
        if SPLITS == 1:
            out = (row * (KV * GROUP * P) + head * P)[:, None] + column[None, :]
            tl.store(y + out, tl.div_rn(mix, total[:, None]), mask=real)
        else:
            part = (row * (KV * GROUP) + head) * SPLITS + tl.program_id(2)
            tl.store(mixes + part[:, None] * P + column[None, :], mix, mask=real)
            tl.store(peaks + part * 2, peak, mask=t < T)
            tl.store(peaks + part * 2 + 1, total, mask=t < T)


@triton.jit
def part_size(slots, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the slots per part, in whole tiles, so a short cache has fewer parts than SPLITS."""
    return tl.cdiv(tl.cdiv(slots, BLOCK_N), SPLITS) * BLOCK_N


@triton.jit
def join(
    mixes,  # f32 [rows, HEADS, SPLITS, P]
    peaks,  # f32 [rows, HEADS, SPLITS, 2]
    run,
    y,  # f32 [rows, HEADS·P]
    T,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # as in `attend`
    BLOCK_P: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # as in `attend`
):
    """Combine the softmaxes of the parts into one over all slots (FlashDecoding)."""
    one = tl.program_id(0) * HEADS + tl.program_id(1)
    past = tl.load(run + PAST)
    slots = past + T - _base(past, WINDOW)
    split = tl.arange(0, SPLITS)
    there = split * part_size(slots, SPLITS, BLOCK_N) < slots
    part = one * SPLITS + split
    peak = tl.load(peaks + part * 2, mask=there, other=float("-inf"))
    total = tl.load(peaks + part * 2 + 1, mask=there, other=0.0)
    weight = tl.exp(peak - tl.max(peak, 0))  # every token sees itself: the largest is finite
    column = tl.arange(0, BLOCK_P)
    mix = tl.load(
        mixes + part[:, None] * P + column[None, :],
        mask=there[:, None] & (column < P)[None, :],
        other=0.0,
    )
    out = tl.div_rn(tl.sum(mix * weight[:, None], 0), tl.sum(total * weight, 0))
    tl.store(y + one * P + column, out, mask=column < P)
