"""Parts of a prompt that run in parallel, for Mamba-1's scan with a state that is not rounded.

A prompt is cut if the device has room for more programs than the channels need. Over a part, h
becomes exp(A·ΣΔ)·h plus the end state from zeros; `ended` computes this end state and ΣΔ of each
part. Then every part computes its first state from those of the parts before it, and runs its
tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.replay import ADVANCE, PENDING, PROGRAMS, STORE
from edge.plugins.selective_scan.triton_scan_token import fed, step_size


@triton.jit
def part_of(run, tokens, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return (number of parts, this program's first token, one past its last token).

    There are as many parts as the device has room for, and none is shorter than PART tokens.
    """
    room = tl.load(run + PROGRAMS) // (tl.num_programs(0) * tl.num_programs(1))
    count = tl.maximum(1, tl.minimum(tl.minimum(room, PARTS), tokens // PART))
    length = tl.cdiv(tokens, count)
    begin = tl.minimum(tl.program_id(2) * length, tokens)
    return count, begin, tl.minimum(begin + length, tokens)


@triton.jit
def share_of(run, tokens, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return (part, number of parts, first token, one past the last token, tokens to replay, tokens
    after which the state is stored, `store` mode) of this program.

    Every part in use replays the pending tokens; only one part stores. Unused parts run no tokens.
    """
    store = tl.load(run + STORE)
    pending = tl.load(run + PENDING)
    advance = tl.where(store == 1, tl.load(run + ADVANCE), 0)
    part, parts, begin, end = 0, 1, 0, tokens
    if PARTS > 1:
        part = tl.program_id(2)
        parts, begin, end = part_of(run, tokens, PART, PARTS)
        pending = tl.where(part < parts, pending, 0)
        advance = tl.where(part == 0, advance, 0)
        store = tl.where(part == parts - 1, store, 0)
    return part, parts, begin, end, pending, advance, store


@triton.jit
def ended(
    inputs, dt, begin, end, at, rate, feeding, batch, sequence,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STRIDES: tl.constexpr, DT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return the state after tokens `begin` … `end` - 1 from zeros, and the sum of their Δ."""
    e, in_e, n, in_n = at
    h = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_E], tl.float32)
    row = begin * batch + sequence
    x = tl.load(inputs[0] + row * STRIDES[0] + e, mask=in_e, other=0)
    B = tl.load(inputs[1] + row * STRIDES[1] + n, mask=in_n, other=0)
    own = tl.load(dt + row * DT_STRIDE + e, mask=in_e, other=0)
    for t in tl.range(begin, end, loop_unroll_factor=2):
        x_now, B_now, dt_now = x, B, own
        row = tl.minimum(t + 1, end - 1) * batch + sequence
        x = tl.load(inputs[0] + row * STRIDES[0] + e, mask=in_e, other=0)
        B = tl.load(inputs[1] + row * STRIDES[1] + n, mask=in_n, other=0)
        own = tl.load(dt + row * DT_STRIDE + e, mask=in_e, other=0)
        delta = step_size(dt_now, feeding)
        h = fed(h, x_now, delta, B_now, rate, feeding)
        total += delta
    return h, total


@triton.jit
def store_end(
    of_parts, inputs, dt, begin, end, part, at, each, inside, rate, feeding, batch, sequence,
    E: tl.constexpr, N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    STRIDES: tl.constexpr, DT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Store this part's end state from zeros, and its ΣΔ, for `joined`."""
    h, total = ended(
        inputs, dt, begin, end, at, rate, feeding, batch, sequence,
        BLOCK_N, BLOCK_E, STRIDES, DT_STRIDE,
    )  # fmt: skip
    row = (part * batch + sequence).to(tl.int64)
    tl.store(of_parts[0] + row * (N * E) + each, h, mask=inside)
    tl.store(of_parts[1] + row * E + at[0], total, mask=at[1])


@triton.jit
def joined(
    h, of_parts, count, e, in_e, each, inside, rate, batch, sequence,
    E: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Return h after the first `count` parts of the run."""
    for part in range(count):
        row = (part * batch + sequence).to(tl.int64)
        total = tl.load(of_parts[1] + row * E + e, mask=in_e, other=0.0)
        made = tl.load(of_parts[0] + row * (N * E) + each, mask=inside, other=0.0)
        h = tl.fma(tl.exp2(total[None, :] * rate), h, made)
    return h
