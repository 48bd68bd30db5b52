"""GELU in fp32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x/2 · (1 + erf(x/√2))."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with the tanh approximation of erf."""
    return F.gelu(x, approximate="tanh")
