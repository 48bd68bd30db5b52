"""RMSNorm and LayerNorm, in fp32 for any input type."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import quantize


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight · x / sqrt(mean(x²) + eps). x [..., D], weight [D]."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return LayerNorm over the last axis. x [..., D], weight and bias [D]."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of the sum, and the sum."""
    total = x + added
    return rms_norm(total, weight, eps), total


def add_layer_norm(
    x: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return LayerNorm of the sum, and the sum."""
    total = x + added
    return layer_norm(total, weight, bias, eps), total


def rms_norm_quantize(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return RMSNorm, quantized. x f32 [..., D], weight [D], scale [1|D] → i8 [..., D]."""
    return quantize(rms_norm(x, weight, eps), scale)


def add_rms_norm_quantize(
    x: Tensor, added: Tensor, weight: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm of the sum, quantized, and the sum."""
    total = x + added
    return rms_norm_quantize(total, weight, scale, eps), total
