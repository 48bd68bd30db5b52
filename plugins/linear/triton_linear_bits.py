"""fp32 rows times weights of 8 or 4 bits in blocks of columns that share a scale.

`few` multiplies in fp32. `many` multiplies on tensor cores: it scales the weights first and rounds
them and x to fp16, as with fp16 weights. Sums of blocks that are scaled afterwards cost more than
the products: each is an fp32 value per output for 32 columns. Low and high nibbles are multiplied
by the even and odd columns of x, as in `linear_int4`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.linear.triton_blocks import few_blocks
from edge.plugins.linear.triton_linear import dot_float, to_half


@triton.jit
def centred(quant, zero: tl.constexpr):
    """Return u8 quants minus their zero point as f16: q becomes the low bits of 1024 + q."""
    return (quant.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)


@triton.jit
def weights_of(codes, unit, least, BITS: tl.constexpr):
    """Return code · unit + least, or (code - middle) · unit if least is None, rounded to f16."""
    values = ((codes.to(tl.int32) | 0x4B000000)).to(tl.float32, bitcast=True)
    if least is None:
        weight = (values - (8388608.0 + (1 << (BITS - 1)))) * unit
    else:
        weight = tl.fma(values - 8388608.0, unit, least)
    return weight.to(tl.float16)


@triton.jit
def both_half(x, j, mask, PAIRED: tl.constexpr):
    """Load columns 2j and 2j+1 of f32 rows as f16; as pairs if rows are aligned to 8 bytes."""
    if PAIRED:
        pair = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + j, mask=mask, other=0)
        even = pair.to(tl.int32).to(tl.float32, bitcast=True)
        odd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        even = tl.load(x + 2 * j, mask=mask, other=0.0)
        odd = tl.load(x + 2 * j + 1, mask=mask, other=0.0)
    return to_half(even), to_half(odd)


@triton.jit
def few(
    x,  # f32 [M, K], row stride X_STRIDE
    packed,  # u8 [N, K·BITS/8]
    scales,  # f32 or f16 [N, K/SHARED]
    y,  # f32 [M, N]
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns that share a scale
    WORD: tl.constexpr,  # see `few_blocks`
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    minimums=None,  # like scales: the value of code 0; None: the middle code is 0
):
    # neighbouring programs share weights
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = few_blocks(
        x, packed, scales, minimums, m, n, M, N, K, X_STRIDE,
        BITS, SHARED, WORD, WORDS, BLOCKS, ROWS, BLOCK_N, STAGES,
    )  # fmt: skip
    tl.store(y + m[:, None] * N + n[None, :], total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def many(
    x,  # as for `few`
    packed,
    scales,
    y,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    PIECE: tl.constexpr,  # columns of one scale that are multiplied at once, divides SHARED
    PIECES: tl.constexpr,  # per step, a power of 2; 1 unless PIECE is SHARED
    PAIRED: tl.constexpr,  # whether x's rows start at multiples of 8 bytes
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # PIECE, rounded up to a power of 2
    STAGES: tl.constexpr,
    minimums=None,
):
    # Adjacent programs share weights: a chunk of rows fits in L2, so weights are read once.
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    BYTES: tl.constexpr = PIECE * BITS // 8
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8
    COUNT: tl.constexpr = K // PIECE
    piece, byte = tl.arange(0, PIECES), tl.arange(0, WIDTH)
    at = piece[:, None] * BYTES + byte[None, :]  # of a step's bytes; byte j has column j or two
    packed += n.to(tl.int64)[:, None, None] * (COUNT * BYTES) + at[None, :, :]
    scales += n.to(tl.int64)[:, None] * (K // SHARED)
    if minimums is not None:
        minimums += n.to(tl.int64)[:, None] * (K // SHARED)
    x += m.to(tl.int64)[:, None, None] * X_STRIDE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, COUNT, PIECES, num_stages=STAGES):
        there = start + piece < COUNT
        some = there[:, None] & (byte < BYTES)[None, :]
        inside = (n < N)[:, None] & there[None, :]
        rows = (m < M)[:, None, None] & some[None, :, :]
        codes = tl.load(packed + start * BYTES, (n < N)[:, None, None] & some[None, :, :], 0)
        group = ((start + piece) // (SHARED // PIECE))[None, :]
        unit = tl.load(scales + group, inside, 0.0).to(tl.float32)[:, :, None]
        least = None
        if minimums is not None:
            least = tl.load(minimums + group, inside, 0.0).to(tl.float32)[:, :, None]
        if BITS == 4:
            even, odd = both_half(x, start * BYTES + at[None, :, :], rows, PAIRED)
            total = product(even, weights_of(codes & 15, unit, least, 4), total)
            total = product(odd, weights_of(codes >> 4, unit, least, 4), total)
        else:
            of_x = to_half(tl.load(x + start * BYTES + at[None, :, :], rows, 0.0))
            total = product(of_x, weights_of(codes, unit, least, 8), total)
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(y + place, total, mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def product(x, weight, total):
    """Return total + x · weightᵀ, for x [BLOCK_M, PIECES, WIDTH] and weight [BLOCK_N, …]."""
    flat_x = tl.reshape(x, (x.shape[0], x.shape[1] * x.shape[2]))
    flat = tl.reshape(weight, (weight.shape[0], weight.shape[1] * weight.shape[2]))
    return dot_float(flat_x, tl.trans(flat), total)
