"""Causal convolutions of layers: their weights, and the one without SiLU in the graph."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from edge.export.nodes.layer import LayerGraph
from edge.export.training_ops import causal_conv1d_training
from edge.plugins.causal_conv1d.reference import causal_conv1d


class Conv1d(nn.Module):
    """Weights of a causal depthwise convolution: weight [C, K], bias [C] or None."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, conv_state: Tensor) -> tuple[Tensor, Tensor]:
        """With SiLU."""
        run = causal_conv1d_training if torch.is_grad_enabled() else causal_conv1d
        return run(x, conv_state, self.weight, self.bias)


def plain_convolution(at: LayerGraph, x: str, channels: int, width: int, bias: bool) -> str:
    """Without SiLU, fp32; binds the layer's conv_state and emits its kept rows."""
    g, rows = at.g, width - 1
    state = g.input(at.named("conv_state"), "f32", [rows, "B", channels])
    weight = g.weight(at.named("conv1d.weight"), lambda w: w.T[:, None, :])
    offset = at.named("conv1d.bias")
    if bias:
        g.weight(offset)
    else:
        g.constant(offset, np.zeros(channels, np.float32))
    taps, kept_taps = at.shared.taps[width]
    y, states = g.call(
        "CausalConvPlain",
        [x, state, taps, kept_taps, weight, offset],
        [at.named("conv"), at.named("conv_states")],
    )
    g.output(states, ["R", rows, "B", channels])
    return y
