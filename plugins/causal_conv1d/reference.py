"""Causal depthwise convolution with state, on floats and on int8 values, with and without SiLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.quantize.reference import quantize


def causal_conv1d(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return silu(Σ_k weight[:, k] · x[t-K+1+k] + bias), with the tokens before x in conv_state.

    x [B, T, C]; conv_state [B, K-1, C], oldest token first; weight [C, K]; bias [C] or None.
    Returns y [B, T, C] and the last K-1 inputs.
    """
    y, after = causal_conv_plain(x, conv_state, weight, bias)
    return F.silu(y), after


def causal_conv_plain(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return causal_conv1d without SiLU."""
    width, steps = weight.shape[1], x.shape[1]
    padded = torch.cat([conv_state.to(x.dtype), x], dim=1)
    y = sum(padded[:, k : k + steps] * weight[:, k] for k in range(width))
    assert isinstance(y, Tensor)
    if bias is not None:
        y = y + bias
    return y, padded[:, steps:]


def causal_conv1d_int8(
    x: Tensor,
    x_scale: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    bias_scale: Tensor,
    y_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return causal_conv1d on int8 values, quantized by y_scale.

    All values int8: x [B, T, C]; conv_state [B, K-1, C], oldest token first, with x's scale;
    weight [C, K], weight_scale [1] or [C]; bias [C]. Returns y [B, T, C] and the last K-1 inputs.
    """
    width, steps = weight.shape[1], x.shape[1]
    inputs = torch.cat([conv_state, x], dim=1)
    taps = weight.T.float() * weight_scale
    ys = []
    for t in range(steps):
        total = bias.float() * bias_scale
        for k in range(width):
            total = total + inputs[:, t + k].float() * x_scale * taps[k]
        ys.append(quantize(F.silu(total), y_scale))
    return torch.stack(ys, 1), inputs[:, steps:]


def _over_chain(conv: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap a convolution as the op is stated, for chains only."""

    def node(
        x: Tensor, conv_state: Tensor, kept_taps: Tensor, weight: Tensor, **others: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = {"x": x.transpose(0, 1), "conv_state": conv_state.transpose(0, 1)}
        arguments = {n: value for n, value in others.items() if n == "bias" or n.endswith("_scale")}
        y, _ = conv(**rows, weight=weight[:, 0].T, **arguments)
        return y.transpose(0, 1), torch.cat([conv_state, x])[kept_taps]

    return node


causal_conv1d_node = _over_chain(causal_conv1d)
causal_conv_plain_node = _over_chain(causal_conv_plain)
causal_conv1d_int8_node = _over_chain(causal_conv1d_int8)
