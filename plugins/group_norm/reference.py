"""RMSNorm of groups and of parts, in fp32 for any input type."""

from __future__ import annotations

import torch
from torch import Tensor


def group_rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Norm x [..., D] over groups of D/groups adjacent values, times weight [D]."""
    split = x.float().unflatten(-1, (groups, -1))
    split = split * torch.rsqrt(split.square().mean(-1, keepdim=True) + eps)
    return weight * split.flatten(-2).to(x.dtype)


def parts_rms_norm(x: Tensor, weight: Tensor, eps: float, first: int) -> Tensor:
    """Norm `first` values of x [..., D] and both halves of the rest apart, times weight [D]."""
    half = (x.shape[-1] - first) // 2
    parts = x.float().split([first, half, half], dim=-1)
    normed = [part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) for part in parts]
    return weight * torch.cat(normed, -1).to(x.dtype)
