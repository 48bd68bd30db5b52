"""Mamba-2's selective scan, token by token, with a scalar A per head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.selective_scan.reference import Scan, by_pieces, by_token, dequantized

_NO_LIMIT = (0.0, float("inf"))


def selective_scan_heads(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    dt_limit: tuple[float, float] = _NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Run h = exp(Δ·A)·h + Δ·x⊗B;  y = h·C + D·x, with a scalar A per head (Mamba-2, section 3).

    Δ = clamp(softplus(dt + dt_bias), *dt_limit). The gated norm after the scan applies the gate.
    x [B, T, H, P]; dt [B, T, H]; A_log, D, dt_bias [H]; B, C [B, T, G, N]; ssm_state [B, H, P, N].
    Returns y [B, T, H, P] and the state after the last token, in fp32.
    """
    delta = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    decay = torch.exp(delta * -torch.exp(A_log.float()))
    repeat = x.shape[2] // B.shape[2]
    B, C = (m.float().repeat_interleave(repeat, dim=2) for m in (B, C))
    h = ssm_state.float()
    ys = []
    for t in range(x.shape[1]):
        scaled = delta[:, t, :, None] * x[:, t].float()
        h = decay[:, t, :, None, None] * h + scaled[..., None] * B[:, t, :, None, :]
        ys.append((h * C[:, t, :, None, :]).sum(-1))
    y = torch.stack(ys, 1) + D.float()[:, None] * x.float()
    return y.to(x.dtype), h


def selective_scan_heads_int8(
    ssm_state: Tensor,
    state_scale: Tensor,
    groups: int = 1,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    **given: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run `selective_scan_heads` on int8 values; the state is rounded after every token.

    `given` has x [B, T, H·P], dt [B, T, H], B, C [B, T, G·N], A_log, D and dt_bias [H] in int8, and
    their scales, such as `x_scale`, [1] or one per channel. ssm_state [B, H, P, N] is fp32, fp16 or
    int8 (with state_scale [1] or [H, 1, N]).
    Returns y fp32 [B, T, H·P], not gated, and the state after the last token in its own type.
    """
    wide = dequantized(given)
    values = {name: wide.pop(name) for name in ("x", "dt", "B", "C")}
    counts = {"x": values["dt"].shape[-1], "B": groups, "C": groups}
    values |= {name: values[name].unflatten(-1, (count, -1)) for name, count in counts.items()}
    scan = partial(selective_scan_heads, dt_limit=dt_limit, **wide)
    y, state = by_token(scan, values, ssm_state, state_scale)
    return y.flatten(-2), state


# -- ops as stated ---------------------------------------------------------------------------------


def selective_scan_heads_node(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    heads: int,
    groups: int,
    dt_min: float,
    dt_max: float,
    x_log: Tensor | None = None,
    dt_log: Tensor | None = None,
    B_log: Tensor | None = None,
    *,
    scan: Scan = selective_scan_heads,
) -> tuple[Tensor, Tensor]:
    """Run the op as stated, over a chain, by any `scan` with the signature of the default."""
    values = _with_logs({"x": x, "dt": dt, "B": B, "C": C}, x=x_log, dt=dt_log, B=B_log)
    counts = {"x": heads, "B": groups, "C": groups}
    values |= {name: values[name].unflatten(-1, (count, -1)) for name, count in counts.items()}
    limit = (dt_min, dt_max)

    by_rate = partial(scan, A_log=torch.log(-A), D=D, dt_bias=dt_bias, dt_limit=limit)
    y, states = by_pieces(by_rate, values, ssm_state, kept)
    return y.flatten(-2)[-len(x) :], states


def selective_scan_heads_int8_node(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    groups: int,
    dt_min: float,
    dt_max: float,
    x_log: Tensor | None = None,
    dt_log: Tensor | None = None,
    B_log: Tensor | None = None,
    **others: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run the op as stated, over a chain."""
    values = _with_logs({"x": x, "dt": dt, "B": B, "C": C}, x=x_log, dt=dt_log, B=B_log)
    limit = (dt_min, dt_max)
    scan = partial(selective_scan_heads_int8, groups=groups, dt_limit=limit, **others)
    y, states = by_pieces(scan, values, ssm_state, kept)
    return y[-len(x) :], states


def _with_logs(values: Mapping[str, Tensor], **logs: Tensor | None) -> dict[str, Tensor]:
    """Return `values` with those of the logged tokens before them.

    The output of logged tokens is not needed, so their C is 0.
    """
    logged = {name: log for name, log in logs.items() if log is not None and len(log)}
    if not logged:
        return dict(values)
    C = values["C"]
    logged["C"] = C.new_zeros(len(logged["x"]), *C.shape[1:])
    return {name: torch.cat([logged[name], new]) for name, new in values.items()}
