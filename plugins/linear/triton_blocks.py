"""A few rows times weights of 8 or 4 bits in blocks of columns that share a scale.

For so few rows, tensor cores would wait for the unpacking of the weights and the scaling of every
block, so each thread multiplies by itself. It holds words of codes of many outputs and the same
columns of x, which all go from memory to its registers. A code times fp32 x becomes the end of the
mantissa of a float, 2ᵉ + code, and 2ᵉ times the sum of x, which all outputs share, is subtracted
once per unit. int8 x is multiplied four at a time, and a unit's sum is exact.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.direct import and_or, bytes_of, dot4, read, read_words
from edge.plugins.linear.triton_linear_int8 import scaled


@triton.jit
def few_alone(
    x,  # f32 or i8 [M, K], row stride X_STRIDE
    x_scale,  # f32 [1]; None: x is f32
    packed,
    scales,
    minimums,
    y_scale,  # None: y is f32
    y,  # i8 or f32 [M, N]
    M,
    ROWS: tl.constexpr,  # at least M
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store the program's BLOCK_N outputs, some at a time: a thread has 32 sums."""
    SOME: tl.constexpr = min(BLOCK_N, 32 // ROWS)
    block = tl.program_id(1).to(tl.int64) * BLOCK_N
    for start in tl.range(0, tl.minimum(BLOCK_N, N - block).to(tl.int32), SOME):
        store_alone(
            x, x_scale, packed, scales, minimums, y_scale, y, block + start, M, ROWS, N, K,
            X_STRIDE, Y_SCALE_STEP, BITS, SHARED, WORD, WORDS, UNIT, BLOCKS, SOME, ALIGNED,
        )  # fmt: skip


@triton.jit
def store_alone(
    x,
    x_scale,
    packed,
    scales,
    minimums,
    y_scale,
    y,
    first,  # of the outputs, i64
    M,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store BLOCK_N outputs of all rows; see `few_alone`."""
    m, n = tl.arange(0, ROWS), first + tl.arange(0, BLOCK_N)
    out = rows_by_blocks(
        x, packed, scales, minimums, first, tl.minimum(m, M - 1), N, K, X_STRIDE, BITS, SHARED,
        WORD, WORDS, UNIT, BLOCKS, BLOCK_N, ALIGNED,
    )  # fmt: skip
    if x_scale is not None:
        out = scaled(out, m, n, x_scale, None, y_scale, M, N, 0, 0, Y_SCALE_STEP)
    tl.store(y + m[:, None] * N + n[None, :], out, (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def rows_by_blocks(
    x,  # f32 or i8 [M, K], row stride X_STRIDE
    packed,  # u8 [N, K·BITS/8]
    scales,  # f32 or f16 [N, K/SHARED]
    minimums,  # like scales: the value of code 0; None: the middle code is 0
    first,  # of the outputs, i64
    m,  # rows, [ROWS]
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    SHARED: tl.constexpr,  # columns of a block
    WORD: tl.constexpr,  # bytes of a word: 4, or 2 or 1 if they divide a block's bytes
    WORDS: tl.constexpr,  # words of a block, rounded up to a power of 2
    UNIT: tl.constexpr,  # words that a thread reads at once: 1, 2 or 4, and divides a block's
    BLOCKS: tl.constexpr,  # blocks per step, a power of 2
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether x and its rows are aligned to 16 bytes
):
    """Return x · weightᵀ of BLOCK_N outputs without the scale of x, f32 [ROWS, BLOCK_N]."""
    ROWS: tl.constexpr = m.shape[0]
    COUNT: tl.constexpr = K // SHARED
    CODES: tl.constexpr = WORD * 8 // BITS
    HELD: tl.constexpr = SHARED // (CODES * UNIT)  # units of a block
    UNITS: tl.constexpr = WORDS // UNIT
    WIDE: tl.constexpr = ALIGNED and WORD == 4

    block, unit = tl.arange(0, BLOCKS), tl.arange(0, UNITS)
    # for one base and constant distances, a load of each output needs no arithmetic
    j = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        j = tl.minimum(first + j, N - 1) - first
    packed += first * (K * BITS // 8)
    scales += first * COUNT
    if minimums is not None:
        minimums += first * COUNT
    # a sum at run time and in every thread: of two constants ptxas 12.9 makes two instructions
    zero = (block[:, None] + unit[None, :]) * tl.program_id(2)
    total = tl.zeros([ROWS, BLOCK_N, BLOCKS, UNITS], tl.float32)
    for start in tl.range(0, COUNT, BLOCKS):
        b = start + block
        if COUNT % BLOCKS != 0:  # what is past the end is read again, and has a scale of 0
            b = tl.minimum(b, COUNT - 1)
        place = b[:, None] * HELD + tl.minimum(unit, HELD - 1)[None, :]
        codes = words_at(packed, place, j, K, BITS, WORD, UNIT)
        scale = scale_at(scales, b, j, start + block, COUNT, BLOCKS)
        least = None
        if minimums is not None:
            least = scale_at(minimums, b, j, start + block, COUNT, BLOCKS)
        at = x + (m[:, None, None] * X_STRIDE + place[None, :, :] * (CODES * UNIT))
        if x.dtype.element_ty == tl.int8:
            total = add_int8(total, at, codes, scale, least, BITS, CODES, UNIT, WIDE)
        else:
            total = add_float(total, at, codes, scale, least, zero, BITS, CODES, UNIT, WIDE)
    if UNITS != HELD:
        total = tl.where((unit < HELD)[None, None, None, :], total, 0.0)
    sums = tl.sum(tl.reshape(total, (ROWS, BLOCK_N, BLOCKS * UNITS)), 2)
    return sums * 0.0625 if x.dtype.element_ty == tl.int8 else sums


@triton.jit
def scale_at(scales, b, j, wanted, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the scales of blocks b of outputs j as f32 [BLOCK_N, BLOCKS]; 0 past the end."""
    scale = read((scales + b)[None, :] + j[:, None] * COUNT).to(tl.float32)
    if COUNT % BLOCKS != 0:
        scale = tl.where((wanted < COUNT)[None, :], scale, 0.0)
    return scale


@triton.jit
def words_at(
    packed,
    place,
    j,
    K: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return the words of unit `place` of outputs j as a tuple of UNIT i32.

    Above a word of 1 or 2 bytes, its bits are undefined.
    """
    apart = (j * (K * BITS // (8 * WORD)))[:, None, None]
    if WORD == 4:
        words = packed.to(tl.pointer_type(tl.int32), bitcast=True)
        codes = read_words((words + place * UNIT)[None, :, :] + apart, UNIT)
    else:
        tl.static_assert(UNIT == 1)
        words = packed
        if WORD == 2:
            words = packed.to(tl.pointer_type(tl.int16), bitcast=True)
        codes = (tl.load((words + place)[None, :, :] + apart).to(tl.int32),)
    return codes


# -- fp32 x ----------------------------------------------------------------------------------------


@triton.jit
def add_float(
    total,
    at,  # pointers to the first column of each unit
    codes,
    scale,
    least,
    zero,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return total + x · weight of a step, for fp32 x."""
    columns = floats_at(at, CODES * UNIT, WIDE)
    # what 2ᵉ adds, of which there are two for 4-bit codes: see `with_exponent`
    even = columns[0]
    for i in tl.static_range(2, CODES * UNIT, 2):
        even += columns[i]
    odd = tl.zeros_like(even)
    for i in tl.static_range(1, CODES * UNIT, 2):
        odd += columns[i]
    ZERO: tl.constexpr = (1 << (BITS - 1)) if least is None else 0
    sums = even * -(256 + ZERO) + odd * -((16 if BITS == 4 else 256) + ZERO)
    sums = tl.broadcast_to(sums[:, None, :, :], total.shape)
    for i in tl.static_range(CODES * UNIT):
        value = with_exponent(codes[i // CODES], zero, i % CODES, BITS)
        sums = tl.fma(value[None, :, :, :], columns[i][:, None, :, :], sums)
    total = tl.fma(sums, scale[None, :, :, None], total)
    if least is not None:
        total += (even + odd)[:, None, :, :] * least[None, :, :, None]
    return total


@triton.jit
def with_exponent(word, zero, i: tl.constexpr, BITS: tl.constexpr):
    """Return 2ᵉ + code i of a word as f32.

    Codes go to bits 15 to 22: two of 4 bits by one shift, for which e is 8 if i is even and 4 if it
    is odd, or one of 8 bits, for which e is 8.
    """
    PLACE: tl.constexpr = 19 if BITS == 4 and i % 2 else 15
    SHIFT: tl.constexpr = PLACE - i * BITS
    moved = word << SHIFT if SHIFT >= 0 else word >> -SHIFT
    exponent = ((150 - PLACE) << 23) + zero[None, :, :]
    return and_or(moved, ((1 << BITS) - 1) << PLACE, exponent).to(tl.float32, bitcast=True)


@triton.jit
def floats_at(at, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Return COUNT f32 after each other as a tuple."""
    columns = ()
    if WIDE:
        for i in tl.static_range(0, COUNT, 4):
            words = read_words(at + i, 4)
            for j in tl.static_range(4):
                columns += (words[j].to(tl.float32, bitcast=True),)
    else:
        for i in tl.static_range(COUNT):
            columns += (read(at + i),)
    return columns


# -- int8 x ----------------------------------------------------------------------------------------


@triton.jit
def add_int8(
    total,
    at,
    codes,
    scale,
    least,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return total + 16 · x · weight of a step, for int8 x and 4-bit codes.

    code ^ 8 is code - 8 in 4-bit two's complement. In the upper half of a byte it keeps its sign,
    16 times as large.
    """
    tl.static_assert(BITS == 4)
    shape: tl.constexpr = total.shape
    columns = pairs_at(at, CODES, UNIT, WIDE)
    sums = None
    for i in tl.static_range(UNIT):
        low = ((codes[i] << 4) ^ -2004318072) & -252645136  # 0x88888888, 0xF0F0F0F0
        high = (codes[i] ^ -2004318072) & -252645136
        even = tl.broadcast_to(columns[2 * i][:, None, :, :], shape)
        odd = tl.broadcast_to(columns[2 * i + 1][:, None, :, :], shape)
        sums = dot4(tl.broadcast_to(low[None, :, :, :], shape), even, sums)
        sums = dot4(tl.broadcast_to(high[None, :, :, :], shape), odd, sums)
    total = tl.fma(sums.to(tl.float32), scale[None, :, :, None], total)
    if least is not None:
        plain = None
        ones = tl.full(columns[0].shape, 0x01010101, tl.int32)
        for i in tl.static_range(2 * UNIT):
            plain = dot4(columns[i], ones, plain)
        middle = tl.fma(scale, 8.0, least) * 16.0  # of code 8
        total += plain.to(tl.float32)[:, None, :, :] * middle[None, :, :, None]
    return total


@triton.jit
def pairs_at(at, CODES: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """Return the even and the odd i8 of each word's columns, as words; what a word lacks is 0."""
    columns = ()
    if WIDE:
        for i in tl.static_range(0, UNIT, 2):
            words = read_words(at + i * CODES, 4 if UNIT > 1 else 2)
            for j in tl.static_range(2 if UNIT > 1 else 1):
                low, high = words[2 * j], words[2 * j + 1]
                columns += (bytes_of(low, high, False), bytes_of(low, high, True))
    else:
        for i in tl.static_range(UNIT):
            for odd in tl.static_range(2):
                word = tl.zeros(at.shape, tl.int32)
                for j in tl.static_range(odd, CODES, 2):
                    value = tl.load(at + i * CODES + j).to(tl.int32) & 255
                    word |= value << (j // 2 * 8)
                columns += (word,)
    return columns
