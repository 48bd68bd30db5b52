"""RMSNorm, LayerNorm and the gated, grouped RMSNorm of Mamba-2, in fp32 whatever the input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / sqrt(mean(x²) + eps). x [..., D], weight [D]."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis. x [..., D], weight and bias [D]."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """norm(y · silu(z)) over groups of d_ssm/groups (Mamba-2, `norm_before_gate=False`).

    y, z [..., d_ssm]; weight [d_ssm].
    """
    h = y.float() * F.silu(z.float())
    grouped = h.unflatten(-1, (groups, -1))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return weight * grouped.flatten(-2).to(y.dtype)
