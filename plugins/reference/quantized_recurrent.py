"""The int8 convolution and scans of `edge.ops.quantized_recurrent`, token by token.

A value is q·scale; `scale` is fp32 [1], or one a channel of the last axis. Everything a token needs
is computed from that token alone, so that a run of T tokens gives the bits of T runs of one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def round8(x: Tensor, scale: Tensor) -> Tensor:
    """clip(round_half_even(x / scale), -128, 127) as int8, like ONNX QuantizeLinear."""
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def keep_state(h: Tensor, dtype: torch.dtype, state_scale: Tensor) -> Tensor:
    """h as it is carried to the next token: fp32, fp16 (half to even) or int8."""
    return round8(h, state_scale) if dtype == torch.int8 else h.to(dtype)


def _kept_value(state: Tensor, state_scale: Tensor) -> Tensor:
    return state.float() * state_scale if state.dtype == torch.int8 else state.float()


def causal_conv1d_int8(
    x: Tensor,
    x_scale: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    bias_scale: Tensor,
    y_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """round8(silu(Σ_k weight[:, k] · x[t-K+1+k] + bias) / y_scale), before x from conv_state.

    All values int8: x [B, T, C]; conv_state [B, K-1, C], oldest token first, with x's scale;
    weight [C, K], weight_scale [1] or [C]; bias [C]. Returns y [B, T, C] and the last K-1 inputs.
    """
    width, steps = weight.shape[1], x.shape[1]
    inputs = torch.cat([conv_state, x], dim=1)
    taps = weight.T.float() * weight_scale
    ys = []
    for t in range(steps):
        total = bias.float() * bias_scale
        for k in range(width):
            total = total + inputs[:, t + k].float() * x_scale * taps[k]
        ys.append(round8(F.silu(total), y_scale))
    return torch.stack(ys, 1), inputs[:, steps:]


def selective_scan_int8(
    x: Tensor,
    x_scale: Tensor,
    dt: Tensor,
    dt_scale: Tensor,
    A_log: Tensor,
    A_log_scale: Tensor,
    B: Tensor,
    B_scale: Tensor,
    C: Tensor,
    C_scale: Tensor,
    D: Tensor,
    D_scale: Tensor,
    dt_bias: Tensor,
    dt_bias_scale: Tensor,
    z: Tensor,
    z_scale: Tensor,
    ssm_state: Tensor,
    state_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mamba-1: h = exp(Δ·A)·s + Δ·B·x;  y = (C·h + D·x)·silu(z);  s is h as it is kept.

    int8: x, dt, z [B, T, E]; A_log [E, N]; B, C [B, T, N]; D, dt_bias [E]. ssm_state [B, N, E] is
    fp32, fp16 or int8 (with state_scale [1] or [N, 1]) and is kept so after every token.
    Returns y fp32 [B, T, E], and the state after the last token in its own type.
    """
    A = -torch.exp(A_log.float() * A_log_scale).T
    skip, offset = D.float() * D_scale, dt_bias.float() * dt_bias_scale
    s, ys = ssm_state, []
    for t in range(x.shape[1]):
        x_t, z_t = x[:, t].float() * x_scale, z[:, t].float() * z_scale
        B_t, C_t = B[:, t].float() * B_scale, C[:, t].float() * C_scale
        delta = F.softplus(dt[:, t].float() * dt_scale + offset)
        decay = torch.exp(delta[:, None, :] * A)
        h = decay * _kept_value(s, state_scale) + (delta * x_t)[:, None, :] * B_t[:, :, None]
        ys.append(((h * C_t[:, :, None]).sum(1) + skip * x_t) * F.silu(z_t))
        s = keep_state(h, ssm_state.dtype, state_scale)
    return torch.stack(ys, 1), s


def selective_scan_heads_int8(
    x: Tensor,
    x_scale: Tensor,
    dt: Tensor,
    dt_scale: Tensor,
    A_log: Tensor,
    A_log_scale: Tensor,
    B: Tensor,
    B_scale: Tensor,
    C: Tensor,
    C_scale: Tensor,
    D: Tensor,
    D_scale: Tensor,
    dt_bias: Tensor,
    dt_bias_scale: Tensor,
    ssm_state: Tensor,
    state_scale: Tensor,
    groups: int = 1,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Mamba-2: h = exp(Δ·A)·s + Δ·x⊗B;  y = h·C + D·x, A scalar per head;  s is h as it is kept.

    Δ = clamp(softplus(dt + dt_bias), *dt_limit). int8: x [B, T, H·P]; dt [B, T, H]; A_log, D,
    dt_bias [H]; B, C [B, T, G·N]. ssm_state [B, H, P, N] is fp32, fp16 or int8 (with state_scale
    [1] or [H, 1, N]) and is kept so after every token.
    Returns y fp32 [B, T, H·P], not gated, and the state after the last token in its own type.
    """
    heads = dt.shape[-1]
    A = -torch.exp(A_log.float() * A_log_scale)
    skip, offset = D.float() * D_scale, dt_bias.float() * dt_bias_scale

    def by_head(m: Tensor) -> Tensor:
        return m.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=1)

    s, ys = ssm_state, []
    for t in range(x.shape[1]):
        x_t = (x[:, t].float() * x_scale).unflatten(-1, (heads, -1))
        B_t = by_head(B[:, t].float() * B_scale)
        C_t = by_head(C[:, t].float() * C_scale)
        delta = F.softplus(dt[:, t].float() * dt_scale + offset).clamp(*dt_limit)
        decay = torch.exp(delta * A)[..., None, None]
        fed = (delta[..., None] * x_t)[..., None] * B_t[:, :, None, :]
        h = decay * _kept_value(s, state_scale) + fed
        y = (h * C_t[:, :, None, :]).sum(-1) + skip[:, None] * x_t
        ys.append(y.flatten(1))
        s = keep_state(h, ssm_state.dtype, state_scale)
    return torch.stack(ys, 1), s
