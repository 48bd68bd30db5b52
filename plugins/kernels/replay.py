"""What kernels with a recurrent state share: the fields of `run`, and states as they are kept."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge import launch
from edge.plugins.kernels import common

# fields of the input `run`
PENDING = tl.constexpr(launch.PENDING)
ADVANCE = tl.constexpr(launch.ADVANCE)
SOURCE = tl.constexpr(launch.SOURCE)
TARGET = tl.constexpr(launch.TARGET)
STORE = tl.constexpr(launch.STORE)
PROGRAMS = tl.constexpr(launch.PROGRAMS)


@triton.jit
def factor(scale, channel, inside, SCALES: tl.constexpr):
    """What one step of these channels is worth: one for all, or one each; 1 where SCALES is 0."""
    if SCALES == 0:
        value = 1.0
    elif SCALES == 1:
        value = tl.load(scale)
    else:
        value = tl.load(scale + channel, mask=inside, other=1.0)
    return value


@triton.jit
def kept(h, scale, kind: tl.constexpr):
    """h as the next token finds it, fp32: rounded to kind and read back."""
    if kind == tl.int8:
        # times 1/scale, not over scale: 10⁻⁷ of the quotient apart, at a tenth of the work
        quotient = h * (1.0 / scale)
        h = common.round_even(tl.minimum(tl.maximum(quotient, -128.0), 127.0)) * scale
    elif kind == tl.float16:
        h = h.to(tl.float16).to(tl.float32)
    return h


@triton.jit
def load_state(pointers, inside, scale, kind: tl.constexpr):
    """The state as `kept` leaves it."""
    h = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    if kind == tl.int8:
        h = h * scale
    return h


@triton.jit
def store_state(pointers, h, inside, scale, kind: tl.constexpr):
    """h is what `kept` returned: q·scale times 1/scale is q, but for roundings that fall away."""
    if kind == tl.int8:
        h = common.round_even(h * (1.0 / scale))
    tl.store(pointers, h.to(kind), mask=inside)
