"""What the gated delta rule in chunks needs of a chunk and no state gives.

See `triton_delta_chunks`.

Each token of a chunk corrects what those before it wrote. All corrections at once are the solution
of a triangular system, T = (I + M)⁻¹ with M[t, j] = β[t]·exp(s[t]-s[j])·(B[t]·B[j]) for j < t (the
UT transform: arXiv 2406.06484, section 3.2; with decays: arXiv 2412.06464, section 3.3).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import sigmoid, softplus
from edge.plugins.kernels.products import dot
from edge.plugins.selective_scan_heads.triton_scan_chunks import copy_rows


@triton.jit
def gates(
    dt, A, dt_bias, row, here, head,
    HEADS: tl.constexpr, DT_STRIDE: tl.constexpr, BETA_MAX: tl.constexpr,
):  # fmt: skip
    """Return s of a chunk's tokens in fp64, and β. Tokens that are not there change nothing.

    In fp64, s[t]-s[j] loses no digits however strong a decay between other tokens is.
    """
    at = dt + row * DT_STRIDE + head
    a = tl.load(at, mask=here, other=0.0)
    b = tl.load(at + HEADS, mask=here, other=0.0)
    rate = softplus(a + tl.load(dt_bias + head)) * tl.load(A + head)
    # exp(-200) is 0 in fp32: the bound changes no decay, and there is no infinity to subtract
    rate = tl.where(rate < -200.0, -200.0, tl.where(here, rate, 0.0))
    return tl.cumsum(rate.to(tl.float64), 0), tl.where(here, BETA_MAX * sigmoid(b), 0.0)


@triton.jit
def inverse(below, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Return (I + below)⁻¹, `below` [CHUNK, CHUNK] strictly lower triangular.

    Diagonal blocks of 1, 2, 4, … rows are inverted from those of half the size:
    [[D, 0], [M, E]]⁻¹ = [[D⁻¹, 0], [-E⁻¹·M·D⁻¹, E⁻¹]]. This is forward substitution by blocks.
    A sum of powers of `below` would lose all digits if keys are alike.
    """
    i = tl.arange(0, CHUNK)
    apart = i[:, None] ^ i[None, :]  # its highest bit: of the smallest block with both
    none = tl.zeros((CHUNK, CHUNK), tl.float32)
    done = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, below, 0.0)
    for level in tl.static_range(1, LEVELS):
        between = tl.where((apart >> level) == 1, below, 0.0)
        done = dot(done, -dot(between, done, none, 0), done, 0)
    return done


@triton.jit
def likeness(
    B, C, row, here, group, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    B_STRIDE: tl.constexpr, C_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return B[t]·B[j] and C[t]·B[j] for the tokens t and j of a chunk."""
    keys = tl.zeros((CHUNK, CHUNK), tl.float32)
    queries = tl.zeros((CHUNK, CHUNK), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        some = here[:, None] & (n < N)[None, :]
        at = group * N + n
        b = tl.load(B + row[:, None] * B_STRIDE + at[None, :], mask=some, other=0.0)
        c = tl.load(C + row[:, None] * C_STRIDE + at[None, :], mask=some, other=0.0)
        keys = dot(b, tl.trans(b), keys, 0)
        queries = dot(c, tl.trans(b), queries, 0)
    return keys, queries


@triton.jit
def store_product(
    factors, values, out, row, here, at, to,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Store factors · WIDTH columns of `values` from `at` on, in `out` from `to` on."""
    for start in range(0, WIDTH, BLOCK):
        c = start + tl.arange(0, BLOCK)
        some = here[:, None] & (c < WIDTH)[None, :]
        given = tl.load(values + row[:, None] * STRIDE + (at + c)[None, :], mask=some, other=0.0)
        product = dot(factors, given, tl.zeros((CHUNK, BLOCK), tl.float32), 0)
        tl.store(out + row[:, None] * OUT_STRIDE + (to + c)[None, :], product, mask=some)


@triton.jit
def keep_rows(
    inputs, logs, row, to, keep, head, group,
    HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    """Copy x, a, b and B of a chunk's rows to the logs: B once for all heads that share it."""
    for start in range(0, P, BLOCK):
        p = start + tl.arange(0, BLOCK)
        x_at = head * P + p
        copy_rows(logs[0], to, HEADS * P, inputs[0], row, STRIDES[0], x_at, keep, p < P)
    for gate in tl.static_range(2):
        at = gate * HEADS + head
        value = tl.load(inputs[1] + row * STRIDES[1] + at, mask=keep, other=0)
        tl.store(logs[1] + to * (2 * HEADS) + at, value, mask=keep)
    if head % (HEADS // GROUPS) == 0:
        for start in range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            b_at = group * N + n
            copy_rows(logs[2], to, GROUPS * N, inputs[2], row, STRIDES[2], b_at, keep, n < N)


@triton.jit
def prepare(
    x,  # f32 [T·B, X_STRIDE]; dt, B and C alike
    dt,
    B,
    C,
    A,  # f32 [HEADS]
    dt_bias,  # f32 [HEADS]
    log_x,  # f32 [S·B, HEADS·P]
    log_dt,  # f32 [S·B, 2·HEADS]
    log_B,  # f32 [S·B, GROUPS·N]
    slots,  # i32 [T]
    tokens,  # T
    batch,  # B
    fades,  # f32 [T·B, 2, HEADS]: decay from the start of t's chunk to t, and from t to its end
    wanted,  # f32 [T·B, HEADS, P]: U = T·(β·x), writes if the chunk started from no state
    known,  # f32 [T·B, HEADS, N]: -W, W = T·(β·exp(s)·B); a state's part in writes is h·W
    mixture,  # f32 [T·B, HEADS, CHUNK]: exp(s[t]-s[j])·(C[t]·B[j]), j from the start of t's chunk
    HEADS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    BETA_MAX: tl.constexpr,
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # columns at a time
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,  # CHUNK = 2^LEVELS
    FEW: tl.constexpr,  # this many tokens `delta_rule.scan` runs
):
    """Compute what depends on no state, and log tokens. A program has one head of a chunk."""
    if tokens <= FEW:
        return
    head, group = tl.program_id(2), tl.program_id(2) // (HEADS // GROUPS)
    t = tl.arange(0, CHUNK)
    here = tl.program_id(0) * CHUNK + t < tokens
    row = (tl.program_id(0) * CHUNK + t) * batch + tl.program_id(1)
    s, beta = gates(dt, A, dt_bias, row, here, head, HEADS, DT_STRIDE, BETA_MAX)
    since = tl.exp(s.to(tl.float32))
    rest = tl.exp((tl.sum(tl.where(t == CHUNK - 1, s, 0.0), 0) - s).to(tl.float32))
    at = fades + row * (2 * HEADS) + head
    tl.store(at, since, mask=here)
    tl.store(at + HEADS, rest, mask=here)

    keys, queries = likeness(B, C, row, here, group, N, CHUNK, BLOCK, B_STRIDE, C_STRIDE)
    fade = tl.exp((s[:, None] - s[None, :]).to(tl.float32))
    fade = tl.where(t[:, None] >= t[None, :], fade, 0.0)
    place = mixture + (row[:, None] * HEADS + head) * CHUNK + t[None, :]
    tl.store(place, queries * fade, mask=here[:, None])
    below = tl.where(t[:, None] > t[None, :], keys * fade, 0.0) * beta[:, None]
    solved = inverse(below, CHUNK, LEVELS) * beta[None, :]
    store_product(
        solved, x, wanted, row, here, head * P, head * P, P, CHUNK, BLOCK, X_STRIDE, HEADS * P
    )
    store_product(
        -solved * since[None, :], B, known, row, here, group * N, head * N, N, CHUNK, BLOCK,
        B_STRIDE, HEADS * N,
    )  # fmt: skip
    slot = tl.load(slots + tl.program_id(0) * CHUNK + t, mask=here, other=-1)
    if tl.max(slot, 0) >= 0:  # in few chunks: logs have few slots
        keep_rows(
            (x, dt, B), (log_x, log_dt, log_B), row, slot * batch + tl.program_id(1), slot >= 0,
            head, group, HEADS, P, N, GROUPS, BLOCK, (X_STRIDE, DT_STRIDE, B_STRIDE),
        )  # fmt: skip
