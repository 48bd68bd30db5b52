"""The gated, grouped RMSNorm of Mamba-2, in fp32 for any input type, and gates without a norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import dequantize


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Return norm(x · silu(z)) in groups of D/groups channels (Mamba-2, `norm_before_gate=False`).

    x, z [..., D]; weight [D].
    """
    h = x.float() * F.silu(z.float())
    grouped = h.unflatten(-1, (groups, -1))
    grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    return weight * grouped.flatten(-2).to(x.dtype)


def gated_rms_norm_int8(
    x: Tensor, z: Tensor, z_scale: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """Return gated_rms_norm with an int8 gate. x f32, z i8 [..., D]; z_scale [1|D]."""
    return gated_rms_norm(x, dequantize(z, z_scale), weight, eps, groups)


def silu_gate(x: Tensor, z: Tensor) -> Tensor:
    """Return x · z · sigmoid(z)."""
    return x * F.silu(z)


def sigmoid_gate(x: Tensor, z: Tensor) -> Tensor:
    """Return x · sigmoid(z)."""
    return x * torch.sigmoid(z)


def head_gate(x: Tensor, z: Tensor, heads: int) -> Tensor:
    """Multiply each head's values by the sigmoid of its gate. x [..., H·P], z [..., H]."""
    return (x.unflatten(-1, (heads, -1)) * torch.sigmoid(z).unsqueeze(-1)).flatten(-2)
