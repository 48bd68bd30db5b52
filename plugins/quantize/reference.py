"""Quantization to int8 and back, along the last axis.

A scale is fp32, [1] or one per channel. A quantized value q represents q · scale.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return clip(round_half_even(x / scale), -128, 127).

    x f32 [..., C], scale [1|C] → i8 [..., C].
    """
    return torch.round(x / scale).clamp(-128, 127).to(torch.int8)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row by its own scale, absmax/127, or 1 where that is 0.

    x f32 [..., C] → y i8 [..., C], scale f32 [..., 1].
    """
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return quantize(x, scale), scale


def split_quantize_rows(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the values below `threshold` in magnitude; return the others as `outliers`.

    Each is 0 where the other has a value.
    """
    large = x.abs() >= threshold
    outliers = torch.where(large, x, 0.0)
    return *quantize_rows(torch.where(large, 0.0, x)), outliers


def dequantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return scale · x. x i8 [..., C], scale [1|C] or [..., 1] of quantize_rows → f32 [..., C]."""
    return scale * x.float()


def fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Round x f32 [..., C] to the int8 grid of scale [1|C]."""
    return dequantize(quantize(x, scale), scale)


def fake_quantize_rows(x: Tensor) -> Tensor:
    """Round x f32 [..., C] to an int8 grid per row."""
    return dequantize(*quantize_rows(x))
