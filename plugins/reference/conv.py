"""Causal depthwise convolution with state, followed by SiLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """silu(Σ_k weight[:, k] · x[t-K+1+k] + bias), reading tokens before x from conv_state.

    x [B, T, C]; conv_state [B, K-1, C], oldest token first; weight [C, K]; bias [C] or None.
    Returns y [B, T, C] and the last K-1 inputs.
    """
    width, steps = weight.shape[1], x.shape[1]
    padded = torch.cat([conv_state.to(x.dtype), x], dim=1)
    y = sum(padded[:, k : k + steps] * weight[:, k] for k in range(width))
    assert isinstance(y, Tensor)
    if bias is not None:
        y = y + bias
    return F.silu(y), padded[:, steps:]
