"""Squared ReLU in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return F.relu(x).square()
