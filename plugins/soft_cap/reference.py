"""Soft cap in the precision of what it is given."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap·tanh(x/cap)."""
    return cap * torch.tanh(x / cap)
