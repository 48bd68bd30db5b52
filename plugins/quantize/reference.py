"""Rounding to int8 and back, along the last axis.

A scale is [1] or one a channel, fp32; a rounded value q stands for q · scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """clip(round_half_even(x / scale), -128, 127). x f32 [..., C], scale [1|C] → i8 [..., C]."""
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by its own scale, absmax/127, or 1 where that is 0.

    x f32 [..., C] → y i8 [..., C], scale f32 [..., 1].
    """
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return quantize(x, scale), scale


def split_quantize_rows(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_rows of the values below `threshold`, zeros in place of the others, and those."""
    large = x.abs() >= threshold
    outliers = torch.where(large, x, 0.0)
    return *quantize_rows(torch.where(large, 0.0, x)), outliers


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """scale · x. x i8 [..., C], scale [1|C], or [..., 1] of quantize_rows → f32 [..., C]."""
    return scale * x.float()


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """x f32 [..., C] on the grid of int8, scale [1|C]."""
    return dequantize(quantize(x, scale), scale)


def fake_quantize_rows(x: Tensor) -> Tensor:
    """x f32 [..., C] on the grid of int8, each row on its own."""
    return dequantize(*quantize_rows(x))
