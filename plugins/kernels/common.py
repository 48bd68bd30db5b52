"""Arithmetic shared by all kernels, with the same results compiled and interpreted."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl


def tensor_cores(_semantic=None):
    """Return whether `tl.dot` runs on tensor cores, at compile time; True when interpreted.

    Below sm_80, Triton 3.9 multiplies without tensor cores and has no int8 product.
    """
    if _semantic is None:
        return True
    arch = _semantic.builder.options.arch  # "sm75"
    return tl.constexpr(int(arch.removeprefix("sm")) >= 80)


# set by hand: under the interpreter, `tl.core.builtin` rejects functions from outside `tl`
tensor_cores.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def round_even(x):
    """Round fp32 x, |x| < 2²², to the nearest integer, ties to even. libdevice cannot be used:
    Triton does not interpret it.

    Above 2²³ the spacing of fp32 is 1, so adding 1.5·2²³ leaves no room for a fraction.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def round8(x):
    """Return clip(round_half_even(x), -128, 127) as int8; clipping first keeps |x| in range."""
    return round_even(tl.minimum(tl.maximum(x, -128.0), 127.0)).to(tl.int8)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) without inf/inf."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def tanh(x):
    """Return tanh via exp(-2|x|), or its series near 0, where 1 - exp(-2|x|) loses digits."""
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    s = x * x
    near = -0.05396825396825397 + s * 0.02186948853615520
    near = x * (1.0 + s * (-0.3333333333333333 + s * (0.13333333333333333 + s * near)))
    return tl.where(tl.abs(x) > 0.25, tl.where(x < 0, -far, far), near)


@triton.jit
def pair_of(
    x, z, WIDTH: tl.constexpr, BLOCK: tl.constexpr, X_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr
):  # fmt: skip
    """Load the program's block of a row of x and of z. Returns both, the offset of the result in
    rows of WIDTH, and the mask of valid channels.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    left = tl.load(x + row * X_STRIDE + channel, mask=inside, other=0.0)
    right = tl.load(z + row * Z_STRIDE + channel, mask=inside, other=0.0)
    return left, right, row * WIDTH + channel, inside


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate where exp(x) is far below 1 and where it overflows.

    log1p(u) = log(1+u) · u / ((1+u) - 1) undoes the rounding of 1+u (Higham, Accuracy and Stability
    of Numerical Algorithms, section 1.14.1).
    """
    u = tl.exp(-tl.abs(x))
    one_more = 1.0 + u
    rounded = one_more - 1.0
    log1p = tl.where(
        rounded == 0.0, u, tl.log(one_more) * (u / tl.where(rounded == 0, 1.0, rounded))
    )
    return tl.maximum(x, 0.0) + log1p
