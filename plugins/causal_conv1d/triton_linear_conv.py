"""A product of at most 16 rows, fused with the causal convolution of some of its columns.

The program that computes a channel computes all the rows of this run that the channel's convolution
needs. It reads them back as a separate convolution would, so results are the same.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.causal_conv1d.triton_conv import convolve
from edge.plugins.linear.triton_linear import few_float
from edge.plugins.linear.triton_linear_int8 import few_int8, scaled


@triton.jit
def few(
    x,  # i8 or f32 [T·B, K], rows X_STRIDE apart; T·B is at most 16
    x_scale,  # the product's arguments, as in `linear_int8.few`; None for floats
    weight,  # i8, f32 or f16 [N, K]
    weight_scale,
    y_scale,
    y,  # i8 or f32 [T·B, N]
    tap_weight,  # from here on the convolution's arguments, as in `conv.conv`
    bias,
    input_scale,
    tap_scale,
    bias_scale,
    output_scale,
    state,
    log,
    output,  # i8 or f32 [T·B, C]
    run,
    taps,
    state_taps,
    kept,
    tokens,  # T
    batch,  # B
    slots,  # S
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WEIGHT_SCALE_STEP: tl.constexpr,
    Y_SCALE_STEP: tl.constexpr,
    START: tl.constexpr,  # columns START … START+C-1 of y are convolved
    C: tl.constexpr,
    WINDOW: tl.constexpr,
    INPUT_SCALES: tl.constexpr,
    TAP_SCALES: tl.constexpr,
    BIAS_SCALES: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    begin = tl.program_id(1) * BLOCK_N
    M = tokens * batch
    m = tl.arange(0, ROWS)
    n = begin + tl.arange(0, BLOCK_N)
    if y_scale is None:
        made = few_float(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K)
    else:
        total = few_int8(x, weight, m, n, M, N, K, X_STRIDE, ROWS, BLOCK_N, BLOCK_K)
        made = scaled(
            total, m, n, x_scale, weight_scale, y_scale, M, N, 0, WEIGHT_SCALE_STEP, Y_SCALE_STEP
        )
    tl.store(y + m[:, None] * N + n[None, :], made, mask=(m < M)[:, None] & (n < N)[None, :])
    if (begin < START + C) & (begin + BLOCK_N > START):
        # make the stored rows visible to the program's other threads
        tl.debug_barrier()
        convolve(
            y + START, tap_weight, bias, input_scale, tap_scale, bias_scale, output_scale, state,
            log, output, run, taps, state_taps, kept, tokens, batch, slots, n - START, 0, ROWS,
            C, WINDOW, N, INPUT_SCALES, TAP_SCALES, BIAS_SCALES, OUTPUT_SCALES, ROWS, BLOCK_N,
        )  # fmt: skip
