"""One token of Mamba-1's scan: its inputs, logs, update of the state and output.

See `triton_scan` for the units of h.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,operator,union-attr"
from __future__ import annotations

import triton
import triton.language as tl

from edge.plugins.kernels.common import silu, softplus


@triton.jit
def dt_of(dt, row, e, in_e, DT_STRIDE: tl.constexpr):
    """Return a token's dt, [BLOCK_E]. If DT_STRIDE is 0, dt [ROWS, BLOCK_E] holds the whole run."""
    if DT_STRIDE == 0:
        rows = tl.arange(0, dt.shape[0])
        own = tl.sum(tl.where(rows[:, None] == row, dt, 0), 0)
    else:
        own = tl.load(dt + row * DT_STRIDE + e, mask=in_e, other=0)
    return own


@triton.jit
def read(inputs, row, at, STRIDES: tl.constexpr):
    """Load a token's x [BLOCK_E], B [BLOCK_N], C [BLOCK_N], z [BLOCK_E] in their stored types."""
    x, B, C, z = inputs
    e, in_e, n, in_n = at
    return (
        tl.load(x + row * STRIDES[0] + e, mask=in_e, other=0),
        tl.load(B + row * STRIDES[1] + n, mask=in_n, other=0),
        tl.load(C + row * STRIDES[2] + n, mask=in_n, other=0),
        tl.load(z + row * STRIDES[3] + e, mask=in_e, other=0),
    )


@triton.jit
def logged(logs, row, at, E: tl.constexpr, LOGGED: tl.constexpr):
    """Load a token's x, dt and B from the logs."""
    e, in_e, n, in_n = at
    return (
        tl.load(logs[0] + row * E + e, mask=in_e, other=0),
        tl.load(logs[1] + row * E + e, mask=in_e, other=0),
        tl.load(logs[2] + row * LOGGED + n, mask=in_n, other=0),
    )


@triton.jit
def stash(logs, row, x, dt, B, at, E: tl.constexpr, LOGGED: tl.constexpr):
    """Write a token to the logs; every program of a sequence writes the same B."""
    e, in_e, n, in_n = at
    tl.store(logs[0] + row * E + e, x, mask=in_e)
    tl.store(logs[1] + row * E + e, dt, mask=in_e)
    tl.store(logs[2] + row * LOGGED + n, B, mask=in_n)


@triton.jit
def step_size(dt, units):
    """Return Δ = softplus(dt + bias), [BLOCK_E]. `units`: of x, of dt, bias, of B."""
    return softplus(dt.to(tl.float32) * units[1] + units[2])


@triton.jit
def fed(h, x, delta, B, rate, units):
    """Return exp(Δ·A)·h + Δ·x·B, h [BLOCK_N, BLOCK_E] after a token, before rounding; delta is Δ.

    rate is A·log2(e), because GPUs have exp2.
    """
    of_x = delta * (x.to(tl.float32) * units[0])
    decay = tl.exp2(delta[None, :] * rate)
    return tl.fma(decay, h, of_x[None, :] * (B.to(tl.float32) * units[3])[:, None])


@triton.jit
def update(h, x, dt, B, rate, units):
    """Return h after one more token, before rounding."""
    return fed(h, x, step_size(dt, units), B, rate, units)


@triton.jit
def output(h, x, C, z, units):
    """Return (C·h + D·x)·silu(z), one value per channel."""
    C_unit, C_gain, D, z_unit = units
    y = tl.sum(h * (C.to(tl.float32) * C_unit)[:, None], 0) * C_gain
    return (y + x.to(tl.float32) * D) * silu(z.to(tl.float32) * z_unit)
