"""Helpers for kernels with a recurrent state: the fields of `run`, loading and storing states, and
a program's block of a per-head state.
"""

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
    """Load the scale of these channels: a shared one, one per channel, or 1 if SCALES is 0."""
    if SCALES == 0:
        value = 1.0
    elif SCALES == 1:
        value = tl.load(scale)
    else:
        value = tl.load(scale + channel, mask=inside, other=1.0)
    return value


@triton.jit
def kept(h, scale, kind: tl.constexpr):
    """Return h as the next token sees it: rounded to `kind` and converted back to fp32."""
    if kind == tl.int8:
        # times 1/scale instead of a division: a relative difference of 10⁻⁷ for a tenth of the work
        quotient = h * (1.0 / scale)
        h = common.round_even(tl.minimum(tl.maximum(quotient, -128.0), 127.0)) * scale
    elif kind == tl.float16:
        h = h.to(tl.float16).to(tl.float32)
    return h


@triton.jit
def load_state(pointers, inside, scale, kind: tl.constexpr):
    """Load a state in fp32, as `kept` returns it."""
    h = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    if kind == tl.int8:
        h = h * scale
    return h


@triton.jit
def store_state(pointers, h, inside, scale, kind: tl.constexpr):
    """Store an h that `kept` returned: q·scale times 1/scale rounds to q exactly."""
    if kind == tl.int8:
        h = common.round_even(h * (1.0 / scale))
    tl.store(pointers, h.to(kind), mask=inside)


@triton.jit
def heads_block(
    state, batch, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Locate the program's block [BLOCK_P, BLOCK_N] of a state [2, batch, HEADS, P, N].

    Returns pointers to the block in the first slot; the slot size; masks of its rows and columns;
    its columns of x, dt and B; and the ends of these columns. The grid is heads × (parts of P ×
    PIECES of N) × sequences.
    """
    head = tl.program_id(0)
    part = tl.program_id(1) // PIECES
    sequence = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    p = part * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(1) % PIECES * BLOCK_N + tl.arange(0, BLOCK_N)
    size = batch.to(tl.int64) * (HEADS * P * N)
    block = state + (sequence * HEADS + head) * (P * N) + p[:, None] * N + n[None, :]
    at = (head * P + p, head, group * N + n)
    ends = (head * P + P, head + 1, group * N + N)
    return block, size, (p < P, n < N), at, ends
