"""RMSNorm in groups, in fp32 whatever the input."""

from __future__ import annotations

import torch
from torch import Tensor


def group_rms_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """x [..., D] normed over each D/groups neighbours, times weight [D]."""
    split = x.float().unflatten(-1, (groups, -1))
    split = split * torch.rsqrt(split.square().mean(-1, keepdim=True) + eps)
    return weight * split.flatten(-2).to(x.dtype)
