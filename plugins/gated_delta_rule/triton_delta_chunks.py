"""A prompt of the gated delta rule, in chunks of tokens that are matrix products.

With s[t] = Σ_{i≤t} softplus(a[i] + dt_bias)·A in a chunk, and U and W of `triton_delta_terms`, the
writes, outputs and state of a chunk with first state h are

    v    = U - W·h
    y[t] = exp(s[t])·(h·C[t]) + Σ_{j≤t} exp(s[t]-s[j])·(C[t]·B[j])·v[j]
    h    = exp(s[last])·h + Σ_j exp(s[last]-s[j])·v[j] ⊗ B[j]

(Gated Delta Networks, arXiv 2412.06464, section 3.3). `delta_terms.prepare` computes what needs no
state, for all chunks side by side. `scan` goes from chunk to chunk, with a program for some
channels of a head, and keeps no state but the last. No exponent is above 0.

The order of summation differs from `delta_rule`: a prompt differs from the same tokens run one by
one, in tests by at most 2·10⁻⁵ of the largest output. A NaN in a token's input spreads to all
outputs of its chunk.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.gated_delta_rule.triton_delta_rule import replayed
from edge.plugins.kernels.products import dot
from edge.plugins.kernels.replay import SOURCE, STORE, TARGET, heads_block


@triton.jit
def rows_of(values, row, STRIDE: tl.constexpr, columns, here, inside):
    """Load `columns` of rows `row`, 0 where there are none."""
    mask = here[:, None] & inside[None, :]
    return tl.load(values + row[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def pieces_of(values, row, STRIDE: tl.constexpr, columns, here, inside):
    """Load pieces [PIECES, rows, columns] of rows `row`, 0 where there are none."""
    mask = here[None, :, None] & inside[:, None, :]
    return tl.load(values + row[None, :, None] * STRIDE + columns[:, None, :], mask=mask, other=0.0)


@triton.jit
def through_chunk(
    h, inputs, terms, y, begin, tokens, batch, sequence, x_at, head, group, n, there,
    HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    PIECES: tl.constexpr, BLOCK_P: tl.constexpr, B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return h [PIECES, columns of N, P] after a chunk, and store its outputs."""
    fades, wanted, known, mixture = terms
    p_inside, n_inside = there
    t = tl.arange(0, CHUNK)
    here = begin + t < tokens
    row = (begin + t) * batch + sequence
    last = (tl.minimum(begin + CHUNK, tokens) - 1) * batch + sequence
    since = tl.load(fades + row * (2 * HEADS) + head, mask=here, other=0.0)
    rest = tl.load(fades + row * (2 * HEADS) + HEADS + head, mask=here, other=0.0)
    lasts = tl.load(fades + last * (2 * HEADS) + head)
    parts = tl.zeros((PIECES, CHUNK, BLOCK_P), tl.float32)

    w = pieces_of(known, row, HEADS * N, head * N + n, here, n_inside)
    written = rows_of(wanted, row, HEADS * P, x_at, here, p_inside)
    written += tl.sum(dot(w, h, parts, 0), 0)
    c = pieces_of(inputs[1], row, C_STRIDE, group * N + n, here, n_inside)
    out = tl.sum(dot(c, h, parts, 0), 0) * since[:, None]
    mixed = rows_of(mixture, row, HEADS * CHUNK, head * CHUNK + t, here, t < CHUNK)
    out = dot(mixed, written, out, 0)
    mask = here[:, None] & p_inside[None, :]
    tl.store(y + row[:, None] * (HEADS * P) + x_at[None, :], out, mask=mask)
    b = pieces_of(inputs[0], row, B_STRIDE, group * N + n, here, n_inside)
    fed = written * rest[:, None]
    fed = tl.broadcast_to(fed[None, :, :], (PIECES, CHUNK, BLOCK_P))
    return dot(tl.permute(b, (0, 2, 1)), fed, h * lasts, 0)


@triton.jit
def scan(
    B,  # f32 [T·B, B_STRIDE]; C alike
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
    tokens,  # T
    batch,  # B
    fades,  # this and what follows are from `prepare`
    wanted,
    known,
    mixture,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BETA_MAX: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N
    PIECES: tl.constexpr,  # of BLOCK_N columns
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,  # this many tokens `delta_rule.scan` runs
):
    if tokens <= FEW:
        return
    sequence = tl.program_id(2)
    block, slot_size, there, at, ends = heads_block(
        state, batch, HEADS, P, N, GROUPS, BLOCK_P, BLOCK_N
    )
    inside = there[0][:, None] & there[1][None, :]
    h = tl.load(block + tl.load(run + SOURCE) * slot_size, mask=inside, other=0)
    target = block + tl.load(run + TARGET) * slot_size
    layer = (tl.load(A + at[1]), tl.load(dt_bias + at[1]))
    h = replayed(
        h, (log_x, log_dt, log_B), run, replay, target, inside, batch, sequence, at, ends, layer,
        HEADS, (HEADS * P, 2 * HEADS, GROUPS * N), BETA_MAX,
    )  # fmt: skip

    # A warp has a piece of the columns: few registers, and no product waits for another warp's.
    width: tl.constexpr = BLOCK_N // PIECES
    n = tl.arange(0, PIECES)[:, None] * width + tl.arange(0, width)[None, :]
    h = tl.reshape(tl.trans(h), (PIECES, width, BLOCK_P))
    for begin in range(0, tokens, CHUNK):
        h = through_chunk(
            h, (B, C), (fades, wanted, known, mixture), y, begin, tokens, batch, sequence, at[0],
            at[1], at[1] // (HEADS // GROUPS), n, (there[0], n < N),
            HEADS, P, N, CHUNK, PIECES, BLOCK_P, B_STRIDE, C_STRIDE,
        )  # fmt: skip
    if tl.load(run + STORE) == 2:
        tl.store(target, tl.trans(tl.reshape(h, (BLOCK_N, BLOCK_P))), mask=inside)
