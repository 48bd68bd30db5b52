"""The gated delta rule, token by token: steps, chains, trees and short runs.

A program holds the states [BLOCK_P, BLOCK_N] of some channels of one head of one sequence in
registers, replays the logged tokens and then runs the new ones, as `triton_scan_heads` does. The
recurrence is that of Gated Delta Networks, arXiv 2412.06464, equation 10.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import sigmoid, softplus
from edge.plugins.kernels.replay import ADVANCE, PENDING, SOURCE, STORE, TARGET, heads_block


@triton.jit
def read_row(x, dt, B, row, at, ends, some, HEADS: tl.constexpr, STRIDES: tl.constexpr):
    """Load one token's values, a, b and key: columns `at` below `ends`, none if some is 0."""
    x_row = tl.load(x + row * STRIDES[0] + at[0], mask=at[0] < ends[0] * some, other=0)
    gate = dt + row * STRIDES[1] + at[1]
    a = tl.load(gate, mask=at[1] < ends[1] * some, other=0)
    b = tl.load(gate + HEADS, mask=at[1] < ends[1] * some, other=0)
    key = tl.load(B + row * STRIDES[2] + at[2], mask=at[2] < ends[2] * some, other=0)
    return x_row, a, b, key


@triton.jit
def advanced(h, token, layer, BETA_MAX: tl.constexpr):
    """Return h after a token. `layer`: A and dt_bias of the head."""
    x, a, b, key = token
    faded = h * tl.exp(softplus(a + layer[1]) * layer[0])
    unknown = x - tl.sum(faded * key[None, :], 1)
    return tl.fma((BETA_MAX * sigmoid(b) * unknown)[:, None], key[None, :], faded)


@triton.jit
def replayed(
    h, logs, run, replay, target, inside, batch, sequence, at, ends, layer,
    HEADS: tl.constexpr, STRIDES: tl.constexpr, BETA_MAX: tl.constexpr,
):  # fmt: skip
    """Return h after the tokens in `replay`; if STORE is 1, store h after ADVANCE of them."""
    advance = tl.where(tl.load(run + STORE) == 1, tl.load(run + ADVANCE), 0)
    for j in range(tl.load(run + PENDING)):
        row = tl.load(replay + j) * batch + sequence
        token = read_row(logs[0], logs[1], logs[2], row, at, ends, 1, HEADS, STRIDES)
        h = advanced(h, token, layer, BETA_MAX)
        if j + 1 == advance:
            tl.store(target, h, mask=inside)
    return h


@triton.jit
def scan(
    x,  # f32 [T·B, X_STRIDE]; dt, B and C alike
    dt,
    B,
    C,
    A,  # f32 [HEADS]
    dt_bias,  # f32 [HEADS]
    state,  # f32 [2, batch, HEADS, P, N]
    log_x,  # f32 [S·B, HEADS·P]
    log_dt,  # f32 [S·B, 2·HEADS]
    log_B,  # f32 [S·B, GROUPS·N]
    y,  # f32 [T·B, HEADS·P]
    run,  # i32 [8]
    replay,  # i32 [S]
    slots,  # i32 [T]
    ancestors,  # i32 [T, T], read only if TREE
    tokens,  # T
    batch,  # B
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BETA_MAX: tl.constexpr,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N
    TREE: tl.constexpr,
    FEW: tl.constexpr = 0,  # more tokens than this are run by chunks; 0 for any number here
):
    if FEW > 0:  # known when compiled: apart from what is known when run  # noqa: SIM102
        if tokens > FEW:
            return
    sequence = tl.program_id(2)
    block, slot_size, there, at, ends = heads_block(
        state, batch, HEADS, P, N, GROUPS, BLOCK_P, BLOCK_N
    )
    p_inside, n_inside = there
    inside = p_inside[:, None] & n_inside[None, :]
    head = at[1]
    h = tl.load(block + tl.load(run + SOURCE) * slot_size, mask=inside, other=0)
    target = block + tl.load(run + TARGET) * slot_size
    log_strides: tl.constexpr = (HEADS * P, 2 * HEADS, GROUPS * N)
    strides: tl.constexpr = (X_STRIDE, DT_STRIDE, B_STRIDE)
    layer = (tl.load(A + head), tl.load(dt_bias + head))

    h = replayed(
        h, (log_x, log_dt, log_B), run, replay, target, inside, batch, sequence, at, ends, layer,
        HEADS, log_strides, BETA_MAX,
    )  # fmt: skip

    # Each token is read while the one before it is computed.
    some = tl.minimum(tokens, 1)
    ahead = read_row(x, dt, B, sequence, at, ends, some, HEADS, strides)
    c_ahead = tl.load(C + sequence * C_STRIDE + at[2], mask=at[2] < ends[2] * some, other=0)
    start = h
    for t in range(tokens):
        if TREE:
            h = start
            for j in range(t):
                if tl.load(ancestors + t * tokens + j) != 0:
                    row = j * batch + sequence
                    token = read_row(x, dt, B, row, at, ends, 1, HEADS, strides)
                    h = advanced(h, token, layer, BETA_MAX)
        row = t * batch + sequence
        slot = tl.load(slots + t)
        token = ahead
        c = c_ahead
        following = tl.minimum(t + 1, tokens - 1) * batch + sequence
        ahead = read_row(x, dt, B, following, at, ends, 1, HEADS, strides)
        c_ahead = tl.load(C + following * C_STRIDE + at[2], mask=n_inside, other=0)
        h = advanced(h, token, layer, BETA_MAX)
        tl.store(y + row * (HEADS * P) + at[0], tl.sum(h * c[None, :], 1), mask=p_inside)
        if slot >= 0:
            row = slot * batch + sequence
            tl.store(log_x + row * (HEADS * P) + at[0], token[0], mask=p_inside)
            if tl.program_id(1) == 0:
                tl.store(log_dt + row * (2 * HEADS) + head, token[1])
                tl.store(log_dt + row * (2 * HEADS) + HEADS + head, token[2])
                if head % (HEADS // GROUPS) == 0:
                    tl.store(log_B + row * (GROUPS * N) + at[2], token[3], mask=n_inside)
    if not TREE and tl.load(run + STORE) == 2:
        tl.store(target, h, mask=inside)
