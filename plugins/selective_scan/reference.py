"""Mamba-1's selective scan, token by token, and helpers that wrap any scan as a graph's op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import quantize

Scan = Callable[..., tuple[Tensor, Tensor]]


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor,
    ssm_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run h = exp(Δ·A)·h + Δ·B·x;  y = (C·h + D·x)·silu(z)  (Mamba, equations 2a-2b, 4).

    Δ = softplus(dt + dt_bias) and A = -exp(A_log).
    x, dt, z [B, T, E]; A_log [E, N]; B [B, T, G·N] and C [B, T, H·N] for groups of channels; D,
    dt_bias [E]; ssm_state [B, N, E].
    Returns y [B, T, E] and the state after the last token, in fp32.
    """
    A = -torch.exp(A_log.float()).T
    return _scan(x, dt, B, C, z, A=A, D=D, dt_bias=dt_bias, ssm_state=ssm_state)


def _scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    *,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
) -> tuple[Tensor, Tensor]:
    delta = F.softplus(dt.float() + dt_bias.float())
    h = ssm_state.float()
    ys = []
    for t in range(x.shape[1]):
        step = delta[:, t, None, :]
        h = torch.exp(step * A) * h + step * x[:, t, None, :].float() * _spread(B[:, t], A)
        ys.append((h * _spread(C[:, t], A)).sum(1))
    y = torch.stack(ys, 1) + D.float() * x.float()
    return (y * F.silu(z.float())).to(x.dtype), h


def _spread(row: Tensor, A: Tensor) -> Tensor:
    """Expand B or C of a token, [B, G·N], to channels: fp32 [B, N, E], or [B, N, 1] if G is 1."""
    n, channels = A.shape
    groups = row.float().unflatten(-1, (-1, n)).transpose(-1, -2)
    count = groups.shape[-1]
    return groups if count == 1 else groups.repeat_interleave(channels // count, -1)


def selective_scan_int8(
    ssm_state: Tensor, state_scale: Tensor, **given: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `selective_scan` on int8 values; the state is rounded to its type after every token.

    `given` has x, dt, B, C, z, A_log, D and dt_bias in int8, with the shapes of `selective_scan`,
    and their scales, such as `x_scale`, [1] or one per channel. ssm_state [B, N, E] is fp32, fp16
    or int8 (with state_scale [1] or [N, 1]).
    Returns y fp32 [B, T, E], and the state after the last token in its own type.
    """
    wide = dequantized(given)
    values = {name: wide.pop(name) for name in ("x", "dt", "B", "C", "z")}
    scan = partial(_scan, A=-torch.exp(wide.pop("A_log")).T, **wide)
    return by_token(scan, values, ssm_state, state_scale)


# -- shared by all scans ---------------------------------------------------------------------------


def dequantized(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the int8 values that have a scale, in fp32."""
    return {
        name: x.float() * given[f"{name}_scale"]
        for name, x in given.items()
        if f"{name}_scale" in given
    }


def keep_state(h: Tensor, dtype: torch.dtype, state_scale: Tensor) -> Tensor:
    """Return h as it is carried to the next token: fp32, fp16 (half to even) or int8."""
    return quantize(h, state_scale) if dtype == torch.int8 else h.to(dtype)


def by_token(
    scan: Scan, values: Mapping[str, Tensor], ssm_state: Tensor, state_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y [B, T, …] of `scan` over `values` [B, T, …], and the state after it.

    The state is rounded to the type of ssm_state after every token. Everything else is computed
    from one token only, so a run of T tokens gives the bits of T runs of one.
    """
    s, ys = ssm_state, []
    for t in range(values["x"].shape[1]):
        token_values = {name: m[:, t : t + 1] for name, m in values.items()}
        previous = s.float() * state_scale if s.dtype == torch.int8 else s.float()
        y, h = scan(**token_values, ssm_state=previous)
        ys.append(y)
        s = keep_state(h, s.dtype, state_scale)
    return torch.cat(ys, 1), s


# -- ops as stated ---------------------------------------------------------------------------------


def by_pieces(
    scan: Scan, values: Mapping[str, Tensor], ssm_state: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y [T, B, …] of `scan` over `values` [T, B, …], and its state after each kept token.

    The scan is batch-first. It is run from one kept token to the next.
    """
    steps = len(values["x"])
    ends = [0, *(int(token) + 1 for token in kept.tolist())]
    ends = ends if ends[-1] == steps else [*ends, steps]
    ys, states = [], []
    for start, stop in pairwise(ends):
        piece = {name: m[start:stop].transpose(0, 1) for name, m in values.items()}
        y, ssm_state = scan(**piece, ssm_state=ssm_state)
        ys.append(y)
        states.append(ssm_state)
    return torch.cat(ys, 1).transpose(0, 1), torch.stack(states[: kept.numel()])


def selective_scan_node(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    D: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the op as stated, over a chain."""
    scan = partial(selective_scan, A_log=torch.log(-A).T, D=D, dt_bias=dt_bias)
    return by_pieces(scan, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, ssm_state, kept)


def selective_scan_int8_node(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A_log: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    **others: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the op as stated, over a chain."""
    scan = partial(selective_scan_int8, A_log=A_log.T, **others)
    return by_pieces(scan, {"x": x, "dt": dt, "B": B, "C": C, "z": z}, ssm_state, kept)


# the widths of B and C determine the number of groups
selective_scan_groups_node = selective_scan_node
selective_scan_groups_int8_node = selective_scan_int8_node
