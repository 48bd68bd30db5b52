"""The selective scan of Mamba-1 (per channel and state) and Mamba-2 (per head), token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Mamba-1: h = exp(Δ·A)·h + Δ·B·x;  y = (C·h + D·x)·silu(z)  (Mamba, equations 2a-2b, 4).

    With Δ = softplus(dt + dt_bias) and A = -exp(A_log).
    x, dt, z [B, T, E]; A_log [E, N]; B, C [B, T, N]; D, dt_bias [E]; ssm_state [B, N, E].
    Returns y [B, T, E] and the state after the last token, in fp32.
    """
    delta = F.softplus(dt.float() + dt_bias.float())
    A = -torch.exp(A_log.float()).T
    h = ssm_state.float()
    ys = []
    for t in range(x.shape[1]):
        step = delta[:, t, None, :]
        h = torch.exp(step * A) * h + step * x[:, t, None, :].float() * B[:, t, :, None].float()
        ys.append((h * C[:, t, :, None].float()).sum(1))
    y = torch.stack(ys, 1) + D.float() * x.float()
    return (y * F.silu(z.float())).to(x.dtype), h


def selective_scan_heads(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Mamba-2: h = exp(Δ·A)·h + Δ·x⊗B;  y = h·C + D·x, A scalar per head (Mamba-2, section 3).

    Δ = clamp(softplus(dt + dt_bias), *dt_limit). The gate is the gated norm's business.
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
