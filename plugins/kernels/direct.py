"""Loads that stay in the registers of the thread that uses them, and bytes four at a time.

Triton gives every `tl.load` the layout that reads memory best, and moves what it read through
shared memory to where it is used. A load written in PTX has the layout of its use, so nothing is
moved. It is for memory that the kernel does not write, and called impure, so that LLVM leaves all
loads of a step before what waits for the first. Triton also calculates with bytes one by one, each
in a register of its own; here a register has four. Under the interpreter, which has no PTX, plain
Triton does the same.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


def compiled(_semantic=None):
    """Return whether this kernel is being compiled; False when interpreted."""
    return tl.constexpr(_semantic is not None)


# set by hand: under the interpreter, `tl.core.builtin` rejects functions from outside `tl`
compiled.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def read_words(at, COUNT: tl.constexpr):
    """Return COUNT i32 after each other from pointers aligned to them, as a tuple; 1, 2 or 4."""
    tl.static_assert(COUNT == 1 or COUNT == 2 or COUNT == 4)
    at = at.to(tl.pointer_type(tl.int32), bitcast=True)
    if not compiled():
        words = ()
        for i in tl.static_range(COUNT):
            words += (tl.load(at + i),)
    elif COUNT == 1:
        words = (
            tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [at], tl.int32, is_pure=False, pack=1
            ),
        )
    elif COUNT == 2:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [at],
            (tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [at],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def read(at):
    """Return what each pointer points to: values of 4 or 2 bytes."""
    KIND: tl.constexpr = at.dtype.element_ty
    if not compiled():
        value = tl.load(at)
    elif KIND.primitive_bitwidth == 32:
        value = read_words(at, 1)[0].to(KIND, bitcast=True)
    else:
        bits = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [at], tl.int16, is_pure=False, pack=1
        )
        value = bits.to(KIND, bitcast=True)
    return value


@triton.jit
def dot4(a, b, total):
    """Return total + the product of four int8 in a word of a and of b, exact; None is 0."""
    if not compiled():
        sums = tl.zeros(a.shape, tl.int32) if total is None else total
        for i in tl.static_range(0, 32, 8):
            sums += ((a << (24 - i)) >> 24) * ((b << (24 - i)) >> 24)
    elif total is None:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
        )
    else:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, total],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return sums


@triton.jit
def bytes_of(low, high, ODD: tl.constexpr):
    """Return the even bytes of the 8 of two words as a word, or the odd ones."""
    if not compiled():
        if ODD:
            low, high = low >> 8, high >> 8
        low = (low & 255) | ((low >> 8) & 0xFF00)
        return low | ((high & 255) << 16) | ((high & 0xFF0000) << 8)
    elif ODD:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [low, high], tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x6420;", "=r,r,r", [low, high], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def and_or(a, b, c):
    """Return a & b | c of i32 in one instruction, where LLVM would change it into two."""
    if compiled():
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, b, c], tl.int32, is_pure=True, pack=1
        )
    else:
        return a & b | c


# -- bytes of codes in registers of four -----------------------------------------------------------


@triton.jit
def halves_of(codes):
    """Return 1024 + u8 codes as f16, of whose mantissa a code is the low bits."""
    if not compiled():
        values = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        values = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $2, 0x64646464, 0x4140;
            prmt.b32 $1, $2, 0x64646464, 0x4342;
            """,
            "=r,=r,r",
            [codes],
            tl.float16,
            is_pure=True,
            pack=4,
        )
    return values


@triton.jit
def halves_of_nibbles(packed):
    """Return 1024 + the low and 1024 + the high nibbles of u8 as f16."""
    if not compiled():
        low = ((packed & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        high = ((packed >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            prmt.b32 $0, low, 0x64646464, 0x4140;
            prmt.b32 $1, low, 0x64646464, 0x4342;
            prmt.b32 $2, high, 0x64646464, 0x4140;
            prmt.b32 $3, high, 0x64646464, 0x4342;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            (tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def scaled_halves(halves, unit, least):
    """Return (halves - 1024) · unit + least, all f16, rounded once."""
    if not compiled():
        codes = halves.to(tl.float32) - 1024.0
        values = tl.fma(codes, unit.to(tl.float32), least.to(tl.float32)).to(tl.float16)
    else:
        values = tl.inline_asm_elementwise(
            """{
            .reg .b32 base, code;
            mov.b32 base, 0x64006400;
            sub.rn.f16x2 code, $1, base;
            fma.rn.f16x2 $0, code, $2, $3;
            }""",
            "=r,r,r,r",
            [halves, unit, least],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    return values


@triton.jit
def rounded_half(x):
    """Round f32 to f16, clipped to ±65504, for sm_80 or above."""
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [x],
        tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def bytes_of_nibbles(packed):
    """Return the low and the high nibbles of u8 minus 8, times 16, i8.

    n ^ 8 is n - 8 in 4-bit two's complement; in the high bits of a byte it keeps its sign.
    """
    if not compiled():
        signed = packed ^ 0x88
        low = (signed << 4).to(tl.int8, bitcast=True)
        high = (signed & 0xF0).to(tl.int8, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 l, s;
            shl.b32 l, $2, 4;
            and.b32 l, l, 0xF0F0F0F0;
            xor.b32 $0, l, 0x80808080;
            and.b32 s, $2, 0xF0F0F0F0;
            xor.b32 $1, s, 0x80808080;
            }""",
            "=r,=r,r",
            [packed],
            (tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    return low, high
