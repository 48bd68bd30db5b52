"""x · silu(z), and the RMSNorm of it in groups (Mamba-2, arXiv 2405.21060, section 7.1)."""

from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import silu


@triton.jit
def gated(x, z, z_scale, channel, inside, Z_SCALES: tl.constexpr):
    """x · silu(z) of some channels of one row, 0 outside; z is f32, or i8 of Z_SCALES scales."""
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
    z_scale,  # f32 [Z_SCALES], 1 or GROUPS·WIDTH, None where z is f32
    weight,  # f32 [GROUPS·WIDTH]
    y,  # f32 [rows, GROUPS·WIDTH]
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,  # channels of a group: those of one mean square
    BLOCK: tl.constexpr,  # a power of two, at least WIDTH
    X_STRIDE: tl.constexpr,
    Z_STRIDE: tl.constexpr,
    Z_SCALES: tl.constexpr,  # 0 where z is f32
    EPS: tl.constexpr,
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    channel = tl.program_id(1) * WIDTH + at
    # Read before the sum, which waits for all of x and z: one wait for memory, not two.
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
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    out = gated(x + row * X_STRIDE, z + row * Z_STRIDE, None, channel, inside, 0)
    tl.store(y + row * WIDTH + channel, out, mask=inside)
