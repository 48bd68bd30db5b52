"""RMSNorm of x · silu(z) in groups (Mamba-2, arXiv 2405.21060, section 7.1), with or without a
rotation; and gates without a norm.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import pair_of, round8, sigmoid, silu


@triton.jit
def gated(x, z, z_scale, channel, inside, Z_SCALES: tl.constexpr):
    """Return x · silu(z) for some channels of a row, 0 outside; z is f32, or i8 with Z_SCALES."""
    gate = tl.load(z + channel, mask=inside, other=0).to(tl.float32)
    if Z_SCALES == 1:
        gate *= tl.load(z_scale)
    elif Z_SCALES > 1:
        gate *= tl.load(z_scale + channel, mask=inside, other=0.0)
    return tl.load(x + channel, mask=inside, other=0.0) * silu(gate)


@triton.jit
def gated_norm(
    x,  # f32 [rows, X_STRIDE]
    z,  # f32 or i8 [rows, Z_STRIDE]
    z_scale,  # f32 [Z_SCALES], 1 or GROUPS·WIDTH; None if z is f32
    weight,  # f32 [GROUPS·WIDTH]
    y,  # f32 [rows, GROUPS·WIDTH]
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a group, which share a mean square
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    Z_SCALES: tl.constexpr,  # 0 if z is f32
    EPS: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    channel = tl.program_id(1) * WIDTH + at
    # Loaded before the sum, which needs all of x and z, so that memory is waited for only once.
    gain = tl.load(weight + channel, mask=inside, other=0.0)
    g = gated(x + row * X_STRIDE, z + row * Z_STRIDE, z_scale, channel, inside, Z_SCALES)
    spread = tl.sqrt_rn(tl.sum(g * g, 0) / WIDTH + EPS)
    out = gain * (g * tl.div_rn(1.0, spread))
    tl.store(y + row * (GROUPS * WIDTH) + channel, out, mask=inside)


@triton.jit
def silu_gate(
    x,  # f32 [rows, X_STRIDE]
    z,  # f32 [rows, Z_STRIDE]
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
):
    value, gate, at, inside = pair_of(x, z, WIDTH, BLOCK, X_STRIDE, Z_STRIDE)
    tl.store(y + at, value * silu(gate), mask=inside)


@triton.jit
def sigmoid_gate(
    x,  # f32 [rows, X_STRIDE]
    z,  # f32 [rows, Z_STRIDE]
    y,  # f32 [rows, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
):
    value, gate, at, inside = pair_of(x, z, WIDTH, BLOCK, X_STRIDE, Z_STRIDE)
    tl.store(y + at, value * sigmoid(gate), mask=inside)


@triton.jit
def head_gate(
    x,  # f32 [rows, X_STRIDE]
    z,  # f32 [rows, Z_STRIDE]
    y,  # f32 [rows, HEADS·WIDTH]
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # values of a head
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads per program
    BLOCK_W: tl.constexpr,  # a power of two, at least WIDTH
):
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_W)[None, :]
    inside = (head < HEADS) & (column < WIDTH)
    place = head * WIDTH + column
    value = tl.load(x + row * X_STRIDE + place, mask=inside, other=0.0)
    gate = tl.load(z + row * Z_STRIDE + head, mask=head < HEADS, other=0.0)
    tl.store(y + row * (HEADS * WIDTH) + place, value * sigmoid(gate), mask=inside)


@triton.jit
def gated_norm_hadamard(
    x,  # f32 [rows, X_STRIDE], a row is X [P, Q]
    z,  # i8 [rows, Z_STRIDE]
    z_scale,  # f32 [Z_SCALES], 1 or P·Q
    weight,  # f32 [P·Q]
    slow,  # f32 [P, P]
    fast,  # f32 [Q, Q]
    scale,  # f32 [SCALES], 1 or P·Q
    y,  # i8 [rows, P·Q]
    P: tl.constexpr,
    Q: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    Z_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_P: tl.constexpr,  # rows of slow·X·fast per program
    BLOCK_K: tl.constexpr,  # rows of X at a time
    BLOCK_Q: tl.constexpr,  # a power of two, at least Q
):
    """Compute rows `out` of slow · N · fast, quantized; N is a row's gated norm in one group.

    The rotation is linear, so the division by the row's root mean square can come last, and x and
    z are read only once. The product is computed as in `hadamard`.
    """
    row = tl.program_id(0)
    out = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    column = tl.arange(0, BLOCK_Q)
    here = (column < Q)[None, :]
    turn = tl.load(
        fast + column[:, None] * Q + column[None, :], mask=here & (column < Q)[:, None], other=0.0
    )
    mixed = tl.zeros((BLOCK_P, BLOCK_Q), tl.float32)
    squares = tl.zeros((BLOCK_K, BLOCK_Q), tl.float32)
    for start in range(0, P, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        some = tl.load(slow + out * P + k[None, :], mask=(out < P) & (k < P)[None, :], other=0.0)
        at = k[:, None] * Q + column[None, :]
        inside = (k < P)[:, None] & here
        gain = tl.load(weight + at, mask=inside, other=0.0)
        g = gated(x + row * X_STRIDE, z + row * Z_STRIDE, z_scale, at, inside, Z_SCALES)
        squares += g * g
        mixed = tl.dot(some, gain * g, mixed, input_precision="tf32x3")
    spread = tl.sqrt_rn(tl.sum(tl.sum(squares, 1), 0) / (P * Q) + EPS)
    rotated = tl.dot(mixed, turn, input_precision="tf32x3") * tl.div_rn(1.0, spread)
    at = out * Q + column[None, :]
    inside = (out < P) & here
    step = tl.load(scale + at, mask=inside, other=1.0) if SCALES > 1 else tl.load(scale)
    tl.store(y + row * (P * Q) + at, round8(tl.div_rn(rotated, step)), mask=inside)
