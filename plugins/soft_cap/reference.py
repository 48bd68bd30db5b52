"""Soft cap in the precision of its input."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap·tanh(x/cap)."""
    return cap * torch.tanh(x / cap)
