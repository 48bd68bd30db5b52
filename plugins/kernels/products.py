"""Products of fp32 matrices on tensor cores, as exact as sums of fp32 products."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import tensor_cores

LEFT = tl.constexpr(1)
RIGHT = tl.constexpr(2)


@triton.jit
def upper(values):
    """Return fp32 values rounded to the 11 bits of tf32; the rest has at most 12 bits."""
    return ((values.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, total, WHOLE: tl.constexpr):
    """Return total + a · b with fp32 accuracy. tf32 has 11 bits, so fp32 values are split in two.

    The sum takes three products of parts (tf32x3), or two if one factor (WHOLE: LEFT or RIGHT) has
    only values of at most 11 bits, such as int8 or ±1.
    """
    if not tensor_cores():
        total = tl.dot(a, b, total, input_precision="ieee")
    elif WHOLE == LEFT:
        total = tl.dot(a, b - upper(b), total, input_precision="tf32")
        total = tl.dot(a, upper(b), total, input_precision="tf32")
    elif WHOLE == RIGHT:
        total = tl.dot(a - upper(a), b, total, input_precision="tf32")
        total = tl.dot(upper(a), b, total, input_precision="tf32")
    else:
        total = tl.dot(a, b, total, input_precision="tf32x3")
    return total
