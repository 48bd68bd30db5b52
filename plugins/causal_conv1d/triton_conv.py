"""Causal depthwise convolution, SiLU and quantization, on rows of tokens by blocks of channels.

The host lists the K rows of each token's window: rows of the state, of the logs of tokens that the
state does not contain yet, or of this run. Trees, replays and chains are therefore the same to the
kernel. It also stores the state, which is K-1 such rows, and logs the run's inputs. It writes only
the other state slot and free log slots, so no program reads a row that another one writes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import round8, silu
from edge.plugins.kernels.replay import SOURCE, STORE, TARGET, factor


@triton.jit
def row_of(index, sequence, c, inside, x, log, state, batch, slots, C, K, X_STRIDE):
    """Load rows `index` of a sequence's [state: K-1 | log: slots | x]; both are [rows, 1]."""
    at_log = index - (K - 1)
    at_x = at_log - slots
    value = tl.load(state + (index * batch + sequence) * C + c, inside & (at_log < 0), other=0)
    logged = inside & (at_log >= 0) & (at_x < 0)
    value = tl.load(log + (at_log * batch + sequence) * C + c, logged, other=value)
    new = inside & (at_x >= 0)
    return tl.load(x + (at_x * batch + sequence) * X_STRIDE + c, new, other=value)


@triton.jit
def convolve(
    x,  # f32 or i8: channel c of row r at r·X_STRIDE + c; the rest are as for `conv`
    weight,
    bias,
    x_scale,
    weight_scale,
    bias_scale,
    y_scale,
    state,
    log,
    y,
    run,
    taps,
    state_taps,
    kept,
    tokens,
    batch,
    slots,
    channel,  # [BLOCK_C]; those outside 0 … C-1 are skipped
    first,  # first of BLOCK_M rows of y and the log, and of the state's
    every,  # stride between the program's blocks of BLOCK_M state rows
    C: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,
    WEIGHT_SCALES: tl.constexpr,
    BIAS_SCALES: tl.constexpr,
    Y_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SILU: tl.constexpr = True,
):
    """Convolve one program's rows and channels."""
    in_c = (channel >= 0) & (channel < C)
    c = channel[None, :]
    slot_size = batch * ((K - 1) * C)
    source = state + tl.load(run + SOURCE).to(tl.int64) * slot_size

    rows = first + tl.arange(0, BLOCK_M)[:, None]
    token = rows // batch
    sequence = rows % batch
    there = rows < tokens * batch
    inside = in_c[None, :] & there
    # int8 sums are exact; fp32 sums start with the oldest tap
    FLOATING: tl.constexpr = y_scale is None
    kind = tl.float32 if FLOATING else tl.int32
    total = tl.zeros([BLOCK_M, BLOCK_C], kind)
    for k in tl.static_range(K - 1):
        index = tl.load(taps + token * K + k, there, other=0)
        row = row_of(index, sequence, c, inside, x, log, source, batch, slots, C, K, X_STRIDE)
        tap = tl.load(weight + k * C + channel, in_c, other=0).to(kind)
        total += row.to(kind) * tap[None, :]
    # the last tap is the token itself
    own = tl.load(x + rows * X_STRIDE + c, inside, other=0)
    tap = tl.load(weight + (K - 1) * C + channel, in_c, other=0).to(kind)
    total += own.to(kind) * tap[None, :]
    offset = tl.load(bias + channel, in_c, other=0).to(tl.float32)
    if FLOATING:
        out = total + offset[None, :]
        if SILU:
            out = silu(out)
    else:
        unit = factor(x_scale, channel, in_c, X_SCALES)
        unit *= factor(weight_scale, channel, in_c, WEIGHT_SCALES)
        offset *= factor(bias_scale, channel, in_c, BIAS_SCALES)
        steps = 1.0 / factor(y_scale, channel, in_c, Y_SCALES)
        if X_SCALES + WEIGHT_SCALES > 2:
            unit = unit[None, :]
        if Y_SCALES > 1:
            steps = steps[None, :]
        out = round8(silu(total.to(tl.float32) * unit + offset[None, :]) * steps)
    tl.store(y + rows * C + c, out, inside)
    slot = tl.load(kept + token, there, other=-1)
    tl.store(log + (slot * batch + sequence) * C + c, own, inside & (slot >= 0))

    if tl.load(run + STORE) != 0:
        target = state + tl.load(run + TARGET).to(tl.int64) * slot_size
        for start in range(first, (K - 1) * batch, every):
            rows = start + tl.arange(0, BLOCK_M)[:, None]
            there = rows < (K - 1) * batch
            index = tl.load(state_taps + rows // batch, there, other=0)
            row = row_of(
                index, rows % batch, c, in_c[None, :] & there,
                x, log, source, batch, slots, C, K, X_STRIDE,
            )  # fmt: skip
            tl.store(target + rows * C + c, row, in_c[None, :] & there)


@triton.jit
def conv(
    x,  # f32 or i8 [T·B, X_STRIDE]
    weight,  # f32 or i8 [K, C], the oldest tap first
    bias,  # f32 or i8 [C]
    x_scale,  # f32 [X_SCALES]: one, or one per channel; all scales are None for floats
    weight_scale,
    bias_scale,
    y_scale,
    state,  # type of x [2, K-1, B, C]
    log,  # type of x [S·B, C]
    y,  # f32 or i8 [T·B, C]
    run,  # i32 [8]
    taps,  # i32 [T, K]
    state_taps,  # i32 [K-1]
    kept,  # i32 [T]: log slots of the new tokens, or -1
    tokens,  # T
    batch,  # B
    slots,  # S
    C: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,
    WEIGHT_SCALES: tl.constexpr,
    BIAS_SCALES: tl.constexpr,
    Y_SCALES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SILU: tl.constexpr = True,  # applies to floats; int8 always has SiLU
):
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * BLOCK_M
    convolve(
        x, weight, bias, x_scale, weight_scale, bias_scale, y_scale, state, log, y, run, taps,
        state_taps, kept, tokens, batch, slots, channel, first, tl.num_programs(1) * BLOCK_M,
        C, K, X_STRIDE, X_SCALES, WEIGHT_SCALES, BIAS_SCALES, Y_SCALES, BLOCK_M, BLOCK_C,
        SILU,
    )  # fmt: skip
