"""The gated delta rule, token by token."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.selective_scan.reference import by_pieces


def gated_delta_rule(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    beta_max: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Run f = g·h;  h = f + β·(x - f·B) ⊗ B;  y = h·C  (Gated Delta Networks, equation 10).

    g = exp(-exp(A_log)·softplus(a + dt_bias)) and β = beta_max·sigmoid(b), where a and b are the
    halves of dt. x [B, T, H, P]; dt [B, T, 2·H]; A_log, dt_bias [H]; B, C [B, T, G, N]; ssm_state
    [B, H, P, N]. Returns y [B, T, H, P] and the state after the last token, in fp32.
    """
    a, b = dt.float().chunk(2, dim=-1)
    decay = torch.exp(F.softplus(a + dt_bias.float()) * -torch.exp(A_log.float()))
    beta = beta_max * torch.sigmoid(b)
    repeat = x.shape[2] // B.shape[2]
    B, C = (m.float().repeat_interleave(repeat, dim=2) for m in (B, C))
    h = ssm_state.float()
    ys = []
    for t in range(x.shape[1]):
        decayed, key = decay[:, t, :, None, None] * h, B[:, t, :, None, :]
        error = x[:, t].float() - (decayed * key).sum(-1)
        h = decayed + (beta[:, t, :, None] * error)[..., None] * key
        ys.append((h * C[:, t, :, None, :]).sum(-1))
    return torch.stack(ys, 1).to(x.dtype), h


def gated_delta_rule_node(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    kept: Tensor,
    heads: int,
    groups: int,
    beta_max: float,
) -> tuple[Tensor, Tensor]:
    """Run the op as stated, over a chain."""
    counts = {"x": heads, "B": groups, "C": groups}
    values = {"x": x, "dt": dt, "B": B, "C": C}
    values |= {name: values[name].unflatten(-1, (count, -1)) for name, count in counts.items()}
    rule = partial(gated_delta_rule, A_log=torch.log(-A), dt_bias=dt_bias, beta_max=beta_max)
    y, states = by_pieces(rule, values, ssm_state, kept)
    return y.flatten(-2), states
