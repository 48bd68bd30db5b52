"""A row times weights of 8 or 4 bits in blocks of columns that share a scale.

For one row, tensor cores would wait for the unpacking of the weights and the scaling of every
block, so each thread multiplies by itself: it holds whole words of codes and the same columns of x.
A code becomes the end of the mantissa of a float, 2ᵉ + code, in two instructions, and 2ᵉ times the
sum of x, which all outputs share, is subtracted once per word. A word's sum of int8 products is
exact.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_of(packed, WORD: tl.constexpr):
    """Return the pointer to u8 as a pointer to words of WORD bytes."""
    if WORD == 4:
        words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    elif WORD == 2:
        words = packed.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        words = packed
    return words


@triton.jit
def columns_of(x, BLOCKS: tl.constexpr, WORDS: tl.constexpr, CODES: tl.constexpr):
    """Split x [BLOCKS, WORDS, CODES] into CODES tensors [BLOCKS, WORDS], one per code of a word."""
    if CODES == 8:
        even, odd = tl.split(tl.reshape(x, (BLOCKS, WORDS, 2, 2, 2)))
        c04, c26 = tl.split(even)
        c15, c37 = tl.split(odd)
        c0, c4 = tl.split(c04)
        c1, c5 = tl.split(c15)
        c2, c6 = tl.split(c26)
        c3, c7 = tl.split(c37)
        columns = (c0, c1, c2, c3, c4, c5, c6, c7)
    elif CODES == 4:
        c02, c13 = tl.split(tl.reshape(x, (BLOCKS, WORDS, 2, 2)))
        c0, c2 = tl.split(c02)
        c1, c3 = tl.split(c13)
        columns = (c0, c1, c2, c3)
    elif CODES == 2:
        c0, c1 = tl.split(x)
        columns = (c0, c1)
    else:
        columns = (tl.reshape(x, (BLOCKS, WORDS)),)
    return columns


@triton.jit
def row_by_blocks(
    x,  # f32 or i8 [K]
    packed,  # u8 [N, K·BITS/8]
    scales,  # f32 or f16 [N, K/SHARED]
    minimums,  # like scales: the value of code 0; None: the middle code is 0
    n,  # outputs, [BLOCK_N]
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns of a block
    WORD: tl.constexpr,  # bytes of a word: 4, or 2 or 1 if they divide a block's bytes
    WORDS: tl.constexpr,  # words of a block, rounded up to a power of 2
    BLOCKS: tl.constexpr,  # blocks per step, a power of 2
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return weight · x without the scale of x, f32 [BLOCK_N]."""
    CODES: tl.constexpr = WORD * 8 // BITS
    COUNT: tl.constexpr = K // SHARED
    PLACE: tl.constexpr = 16 if BITS == 4 else 15  # bit of the mantissa where a code begins
    BASE: tl.constexpr = 1 << (23 - PLACE)
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    EXPONENT: tl.constexpr = (150 - PLACE) << 23
    ZERO: tl.constexpr = (1 << (BITS - 1)) if minimums is None else 0

    block, word, code = tl.arange(0, BLOCKS), tl.arange(0, WORDS), tl.arange(0, CODES)
    within = word < SHARED // CODES
    of_n = n.to(tl.int64)[:, None] * COUNT + block[None, :]
    scales += of_n
    if minimums is not None:
        minimums += of_n
    # block b of a row begins at its word b·SHARED/CODES
    words = words_of(packed, WORD) + of_n[:, :, None] * (SHARED // CODES) + word[None, None, :]
    x += (block[:, None] * (SHARED // CODES) + word[None, :])[:, :, None] * CODES + code
    # a sum at run time: of two constants, ptxas 12.9 makes two instructions
    exponent = EXPONENT + tl.program_id(2)

    # per word until the end, because sums over words need other threads
    total = tl.zeros([BLOCK_N, BLOCKS, WORDS], tl.float32)
    for start in tl.range(0, COUNT, BLOCKS, num_stages=STAGES):
        there = start + block < COUNT
        inside = (n < N)[:, None] & there[None, :]
        some = there[:, None] & within[None, :]
        held = tl.load(words + start * (SHARED // CODES), inside[:, :, None] & within, 0)
        held = held.to(tl.int32)
        values = tl.load(x + start * SHARED, some[:, :, None], 0).to(tl.float32)
        parts = columns_of(values, BLOCKS, WORDS, CODES)
        plain = parts[0]
        for i in tl.static_range(1, CODES):
            plain += parts[i]
        sums = tl.broadcast_to((plain * -(BASE + ZERO))[None, :, :], total.shape)
        for i in tl.static_range(CODES):
            moved = held << (PLACE - i * BITS) if i * BITS <= PLACE else held >> (i * BITS - PLACE)
            coded = ((moved & MASK) | exponent).to(tl.float32, bitcast=True)
            sums = tl.fma(coded, parts[i][None, :, :], sums)
        unit = tl.load(scales + start, inside, 0.0).to(tl.float32)
        total = tl.fma(sums, unit[:, :, None], total)
        if minimums is not None:
            least = tl.load(minimums + start, inside, 0.0).to(tl.float32)
            total = tl.fma(plain[None, :, :], least[:, :, None], total)
    return tl.sum(tl.sum(total, 2), 1)
