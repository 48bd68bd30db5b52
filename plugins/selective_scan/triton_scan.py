"""Mamba-1's selective scan, token by token: steps, chunks and trees of fp32 or int8 values.

A program holds the states [N, BLOCK_E] of some channels of one sequence in registers, replays the
logged tokens and then runs the new ones; intermediate states never reach memory ("multi-step": The
Mamba in the Llama, arXiv 2408.15237, algorithm 2). The recurrence is that of Mamba, arXiv
2312.00752, algorithm 2. y is read from h before h is rounded to its stored type. A token's inputs
are read one token ahead, so within the loop only h waits for the token before.

A prompt may be cut into parts that run in parallel (`triton_scan_parts`).

h is in units of the stored state's scale: the scales are applied to what is added to h and read
from it, so rounding an int8 state needs no division.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.replay import SOURCE, TARGET, factor, kept, load_state, store_state
from edge.plugins.linear.triton_linear import few_float
from edge.plugins.linear.triton_linear_int8 import few_int8, scaled
from edge.plugins.selective_scan.triton_scan_parts import joined, share_of, store_end
from edge.plugins.selective_scan.triton_scan_token import dt_of, logged, output, read, stash, update


@triton.jit
def replayed(
    h, logs, replay, pending, advance, targets, inside, at, rate, feeding, batch, sequence,
    kind: tl.constexpr, E: tl.constexpr, LOGGED: tl.constexpr,
):  # fmt: skip
    """Return h after the pending tokens; store it after `advance` of them."""
    if pending > 0:
        row = tl.load(replay) * batch + sequence
        coming = logged(logs, row, at, E, LOGGED)
        row = tl.load(replay + tl.minimum(1, pending - 1)) * batch + sequence
        for j in range(pending):
            x, dt, B = coming
            coming = logged(logs, row, at, E, LOGGED)
            row = tl.load(replay + tl.minimum(j + 2, pending - 1)) * batch + sequence
            h = kept(update(h, x, dt, B, rate, feeding), 1.0, kind)
            if j + 1 == advance:
                store_state(targets, h, inside, 1.0, kind)
    return h


@triton.jit
def chained(
    h, first, inputs, dt, logs, slots, y, at, rate, feeding, reading, begin, end, batch, sequence,
    kind: tl.constexpr, E: tl.constexpr, LOGGED: tl.constexpr,
    STRIDES: tl.constexpr, DT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Return h after the new tokens `begin` … `end` - 1; `first` holds the inputs of the first."""
    e, in_e = at[0], at[1]
    if end > begin:
        coming = first
        dt_coming = dt_of(dt, begin * batch + sequence, e, in_e, DT_STRIDE)
        slot_coming = tl.load(slots + begin)
        # unrolled by two, so that prefetched values are not copied between registers
        for t in tl.range(begin, end, loop_unroll_factor=2):
            x_now, B_now, C_now, z_now = coming
            dt_now = dt_coming
            if slot_coming >= 0:
                row = slot_coming * batch + sequence
                stash(logs, row, x_now, dt_now, B_now, at, E, LOGGED)
            after = tl.minimum(t + 1, end - 1)
            row = after * batch + sequence
            coming = read(inputs, row, at, STRIDES)
            dt_coming = dt_of(dt, row, e, in_e, DT_STRIDE)
            slot_coming = tl.load(slots + after)
            h = update(h, x_now, dt_now, B_now, rate, feeding)
            out = output(h, x_now, C_now, z_now, reading)
            tl.store(y + (t * batch + sequence) * E + e, out, mask=in_e)
            h = kept(h, 1.0, kind)
    return h


@triton.jit
def branched(
    h, inputs, dt, logs, slots, ancestors, y, at, rate, feeding, reading, tokens, batch, sequence,
    kind: tl.constexpr, E: tl.constexpr, LOGGED: tl.constexpr,
    STRIDES: tl.constexpr, DT_STRIDE: tl.constexpr,
):  # fmt: skip
    """Run each new token on its own path from h, recomputing its ancestors. No state is stored."""
    e, in_e = at[0], at[1]
    for t in range(tokens):
        branch = h
        for j in range(t):
            if tl.load(ancestors + t * tokens + j) != 0:
                row = j * batch + sequence
                token = read(inputs, row, at, STRIDES)
                own = dt_of(dt, row, e, in_e, DT_STRIDE)
                branch = update(branch, token[0], own, token[1], rate, feeding)
                branch = kept(branch, 1.0, kind)
        row = t * batch + sequence
        x, B, C, z = read(inputs, row, at, STRIDES)
        own = dt_of(dt, row, e, in_e, DT_STRIDE)
        branch = update(branch, x, own, B, rate, feeding)
        tl.store(y + row * E + e, output(branch, x, C, z, reading), mask=in_e)
        slot = tl.load(slots + t)
        if slot >= 0:
            stash(logs, slot * batch + sequence, x, own, B, at, E, LOGGED)


@triton.jit
def group_of(SPAN: tl.constexpr, C_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the program's group of SPAN channels, which share B and C, and its channels within
    the group, [BLOCK_E].
    """
    if C_GROUPS > 1:
        TILES: tl.constexpr = (SPAN + BLOCK_E - 1) // BLOCK_E
        group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    else:
        group, tile = 0, tl.program_id(0)
    return group, tile * BLOCK_E + tl.arange(0, BLOCK_E)


@triton.jit
def expanded(
    low_dt, dt_weight, low_dt_scale, dt_weight_scale, dt_scale, e, rows,
    E: tl.constexpr, RANK: tl.constexpr, LOW_STRIDE: tl.constexpr,
    DT_WEIGHT_SCALES: tl.constexpr, DT_SCALES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return dt of the whole run, [ROWS, BLOCK_E]: low_dt · dt_weight."""
    m = tl.arange(0, ROWS)
    if dt_weight_scale is None:
        dt = few_float(low_dt, dt_weight, m, e, rows, E, RANK, LOW_STRIDE, ROWS, BLOCK_E, BLOCK_K)
    else:
        sums = few_int8(low_dt, dt_weight, m, e, rows, E, RANK, LOW_STRIDE, ROWS, BLOCK_E, BLOCK_K)
        dt = scaled(
            sums, m, e, low_dt_scale, dt_weight_scale, dt_scale, rows, E,
            0, 1 if DT_WEIGHT_SCALES > 1 else 0, 1 if DT_SCALES > 1 else 0,
        ).to(tl.int32)  # fmt: skip
    return dt


@triton.jit
def layer_of(A, D, dt_bias, A_scale, D_scale, dt_bias_scale, each, inside, e, in_e):
    """Load A·log2(e) [BLOCK_N, BLOCK_E], and D and dt_bias [BLOCK_E]."""
    rate = tl.load(A + each, mask=inside, other=0).to(tl.float32)
    skip = tl.load(D + e, mask=in_e, other=0).to(tl.float32)
    offset = tl.load(dt_bias + e, mask=in_e, other=0).to(tl.float32)
    if A_scale is not None:
        rate = -tl.exp(rate * tl.load(A_scale))
        skip = skip * tl.load(D_scale)
        offset = offset * tl.load(dt_bias_scale)
    return rate * 1.4426950408889634, skip, offset


@triton.jit
def units_of(
    x_unit, B_scale, C_scale, state_scale, n, in_n,
    B_SCALES: tl.constexpr, C_SCALES: tl.constexpr, STATE_SCALES: tl.constexpr,
):  # fmt: skip
    """Return the factors of Δ·x and of B as inputs to h, of C, and of the product C·h.

    A scale shared by all states is applied once per channel, not once per state.
    """
    B_unit = factor(B_scale, n, in_n, B_SCALES)
    C_unit = factor(C_scale, n, in_n, C_SCALES)
    if STATE_SCALES > 0:
        state_unit = factor(state_scale, n, in_n, STATE_SCALES)
        B_unit = B_unit / state_unit
        C_unit = C_unit * state_unit
    fed_unit, C_gain = x_unit, 1.0
    if B_SCALES <= 1 and STATE_SCALES <= 1:
        fed_unit, B_unit = x_unit * B_unit, 1.0
    if C_SCALES <= 1 and STATE_SCALES <= 1:
        C_gain, C_unit = C_unit, 1.0
    return fed_unit, B_unit, C_unit, C_gain


@triton.jit
def widen(
    B,  # i8 [T·B, B_STRIDE]
    C,  # i8 [T·B, C_STRIDE]
    wide,  # f32 [T·B, 2·N]: B, then C
    rows,  # T·B
    N: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    inside = (m < rows) & (n < N)
    tl.store(wide + m * (2 * N) + n, tl.load(B + m * B_STRIDE + n, inside), inside)
    tl.store(wide + m * (2 * N) + N + n, tl.load(C + m * C_STRIDE + n, inside), inside)


@triton.jit
def scan(
    x,  # f32, f16 or i8 [T·B, X_STRIDE]; dt, B, C and z alike; B and C may come from `widen`
    dt,  # None if it is computed as low_dt · dt_weight
    B,  # B_GROUPS adjacent groups of N; C has C_GROUPS
    C,
    z,
    low_dt,  # f32 or i8 [T·B, LOW_STRIDE], T·B at most ROWS; None with dt, as the next three
    low_dt_scale,  # f32 [1]
    dt_weight,  # f32, f16 or i8 [E, RANK]
    dt_weight_scale,  # f32 [1] or [E]
    A,  # f32 [N, E], or i8: A_log, A = -exp(A_scale·A_log)
    D,  # f32 or i8 [E]
    dt_bias,  # f32 or i8 [E]
    x_scale,  # f32 [X_SCALES]: one, or one per channel; all scales are None for floats
    dt_scale,
    B_scale,
    C_scale,
    z_scale,
    A_scale,  # f32 [1]
    D_scale,
    dt_bias_scale,
    state_scale,  # f32 [1] or [N, 1], None unless the state is i8
    state,  # f32, f16 or i8 [2, batch, N, E]
    log_x,  # type of x [S·B, E]
    log_dt,  # type of dt [S·B, E]
    log_B,  # type of B before `widen` [S·B, B_GROUPS·N]
    y,  # f32 [T·B, E]; None if ENDS
    run,  # i32 [8]
    replay,  # i32 [S]
    slots,  # i32 [T]
    ancestors,  # i32 [T, T], None for chains
    tokens,  # T
    batch,  # B
    E: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,  # a power of two, at least N
    X_STRIDE: tl.constexpr,
    DT_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
    C_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    X_SCALES: tl.constexpr,  # 0 for floats
    DT_SCALES: tl.constexpr,
    B_SCALES: tl.constexpr,
    C_SCALES: tl.constexpr,
    Z_SCALES: tl.constexpr,
    STATE_SCALES: tl.constexpr,
    DT_WEIGHT_SCALES: tl.constexpr,
    LOW_STRIDE: tl.constexpr,
    RANK: tl.constexpr,  # columns of low_dt
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,  # 8 or 16
    PART: tl.constexpr = 1,  # minimum tokens of a part
    PARTS: tl.constexpr = 1,  # maximum number of parts
    ENDS: tl.constexpr = False,  # only compute the end states of all parts but the last
    part_state=None,  # f32 [parts, B, N, E], None if PARTS is 1: see `ended`
    part_dt=None,  # f32 [parts, B, E]
    B_GROUPS: tl.constexpr = 1,  # divides C_GROUPS, which divides E
    C_GROUPS: tl.constexpr = 1,
):
    sequence = tl.program_id(1)
    SPAN: tl.constexpr = E // C_GROUPS
    group, inner = group_of(SPAN, C_GROUPS, BLOCK_E)
    n = tl.arange(0, BLOCK_N)
    e, in_e, in_n = group * SPAN + inner, inner < SPAN, n < N
    if C_GROUPS > 1:
        first_B = group // (C_GROUPS // B_GROUPS) * N
        B, log_B, C = B + first_B, log_B + first_B, C + group * N
        if B_SCALES > 1:
            B_scale += first_B
        if C_SCALES > 1:
            C_scale += group * N
    LOGGED: tl.constexpr = B_GROUPS * N
    at = (e, in_e, n, in_n)
    inside = in_n[:, None] & in_e[None, :]
    kind: tl.constexpr = state.dtype.element_ty

    # Contiguity is hidden from the compiler, so that a thread loads one channel with all its N and
    # sums over N alone. Loads of 16 bytes per thread would spread that sum over a warp.
    each = tl.max_contiguous(n[:, None] * E + e[None, :], [1, 1])
    # the state first: everything else is small and arrives meanwhile
    size = batch.to(tl.int64) * (N * E)
    states = state + sequence * (N * E) + each
    h = load_state(states + tl.load(run + SOURCE) * size, inside, 1.0, kind)
    targets = states + tl.load(run + TARGET) * size
    part, parts, begin, end, pending, advance, store = share_of(run, tokens, PART, PARTS)

    inputs = (x, B, C, z)
    STRIDES: tl.constexpr = (X_STRIDE, B_STRIDE, C_STRIDE, Z_STRIDE)
    if ancestors is None and not ENDS:
        # the first token's inputs too, which do not depend on the replay
        there = (e, inner < tl.where(end > begin, SPAN, 0), n, n < tl.where(end > begin, N, 0))
        first = read(inputs, begin * batch + sequence, there, STRIDES)

    # Computed before A is loaded: otherwise Triton 3.9 computes all per-channel values in the
    # layout of the product, with 51 barriers instead of 19.
    if low_dt is not None:
        dt = expanded(
            low_dt, dt_weight, low_dt_scale, dt_weight_scale, dt_scale, e, tokens * batch,
            E, RANK, LOW_STRIDE, DT_WEIGHT_SCALES, DT_SCALES, ROWS, BLOCK_E, BLOCK_K,
        )  # fmt: skip

    rate, skip, offset = layer_of(
        A, D, dt_bias, A_scale, D_scale, dt_bias_scale, each, inside, e, in_e
    )
    x_unit = factor(x_scale, e, in_e, X_SCALES)
    fed_unit, B_unit, C_unit, C_gain = units_of(
        x_unit, B_scale, C_scale, state_scale, n, in_n, B_SCALES, C_SCALES, STATE_SCALES
    )
    feeding = (fed_unit, factor(dt_scale, e, in_e, DT_SCALES), offset, B_unit)
    reading = (C_unit, C_gain, skip * x_unit, factor(z_scale, e, in_e, Z_SCALES))

    logs = (log_x, log_dt, log_B)
    of_parts = (part_state, part_dt)
    if ENDS:
        if part < parts - 1:
            store_end(
                of_parts, inputs, dt, begin, end, part, at, each, inside, rate, feeding, batch,
                sequence, E, N, BLOCK_E, BLOCK_N, STRIDES, DT_STRIDE,
            )  # fmt: skip
    else:
        h = replayed(
            h, logs, replay, pending, advance, targets, inside, at, rate, feeding, batch, sequence,
            kind, E, LOGGED,
        )  # fmt: skip
        if PARTS > 1:
            before = tl.where(part < parts, part, 0)
            h = joined(h, of_parts, before, e, in_e, each, inside, rate, batch, sequence, E, N)
        if ancestors is not None:
            branched(
                h, inputs, dt, logs, slots, ancestors, y, at, rate, feeding, reading,
                tokens, batch, sequence, kind, E, LOGGED, STRIDES, DT_STRIDE,
            )  # fmt: skip
        else:
            h = chained(
                h, first, inputs, dt, logs, slots, y, at, rate, feeding, reading,
                begin, end, batch, sequence, kind, E, LOGGED, STRIDES, DT_STRIDE,
            )  # fmt: skip
        if store == 2:
            store_state(targets, h, inside, 1.0, kind)
