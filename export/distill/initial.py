"""Initialise a Mamba mixer from an attention layer, near linear attention: C, B, x and the output
are the projections of q, k, v and o (The Mamba in the Llama, section 2.2, figure 1, algorithm 1).

The parts that attention lacks are set so that they change little at first:

    D        0, and the convolution passes only the newest token;
    dt       1 for every token, and A decays slowly: a head remembers 1/A tokens;
    gate     silu(z) = 1: z's rows are the linear map of the input that is nearest to a constant,
             which exists because normed inputs have a constant part;
    SiLU     follows x, and in Mamba-2 B and C: rows are scaled down to values where it is linear.
             Mamba-2's gated norm cancels the scale of each head.

Outputs are then scaled to be nearest to the attention's (`Student.initialise`): by one number in
Mamba-2's norm, and by one per head in the output of Mamba-1, which has no norm. Mamba-1's dt is 1
because its second matrix is 0; the first is random, or neither would learn. The remaining
differences to attention are its softmax and RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config
from edge.export.checkpoint.families.mamba_in_llama import Mixer, grouped_rows

OPEN = 1.2784645  # silu of it is 1
SOFTPLUS_1 = math.log(math.expm1(1.0))  # softplus of it is 1
X_SIZE, BC_SIZE = 0.3, 0.5  # root mean squares before SiLU
MEMORY = (4.0, 4096.0)  # tokens remembered by the shortest head and by the longest
RIDGE = 1e-3


@dataclass
class Inputs:
    """Mean [D] and second moments [D, D] of a mixer's inputs on some text, fp64 on the CPU."""

    mean: Tensor
    moments: Tensor

    @classmethod
    def of(cls, u: Tensor) -> Inputs:
        """Compute the moments of u [..., D]."""
        rows = u.flatten(0, -2).double()
        return cls(rows.mean(0).cpu(), (rows.T @ rows / len(rows)).cpu())


def from_attention(
    attention: AttentionConfig, mixer: Mixer, weights: dict[str, Tensor], seen: Inputs
) -> dict[str, Tensor]:
    """Return the mixer's tensors in fp32, by their names in the layer.

    `weights` are the attention's, by name. Biases of convolved projections become the
    convolution's.
    """
    heads, dim, kv_heads = attention.n_heads, attention.head_dim, attention.n_kv_heads
    sizes = {"v": (kv_heads, X_SIZE), "k": (kv_heads, BC_SIZE), "q": (heads, BC_SIZE)}
    rows, biases = {"z": gate_rows(seen, mixer.d_inner)}, {}
    for part, (count, size) in sizes.items():
        weight = weights[f"{part}_proj.weight"].double()
        bias = weights.get(f"{part}_proj.bias", weight.new_zeros(len(weight))).double()
        scale = size / _head_rms(weight, bias, count, seen)
        rows[part] = weight * scale.repeat_interleave(dim)[:, None]
        biases[part] = bias * scale.repeat_interleave(dim)
    taps = torch.zeros(mixer.conv_channels, mixer.d_conv)
    taps[:, -1] = 1
    log_decay = -torch.linspace(math.log(MEMORY[0]), math.log(MEMORY[1]), heads)
    recurrent = _RECURRENT[mixer.kind](mixer, kv_heads, rows, biases, log_decay)
    tensors = {"conv1d.weight": taps, "out_proj.weight": weights["o_proj.weight"], **recurrent}
    return {name: tensor.float() for name, tensor in tensors.items()}


Parts = dict[str, Tensor]  # z, v, k and q → rows or biases


def _mamba2(
    mixer: Mamba2Config, kv_heads: int, rows: Parts, biases: Parts, log_decay: Tensor
) -> Parts:
    stored = grouped_rows(mixer, kv_heads)
    dt = rows["q"].new_zeros(mixer.n_heads, rows["q"].shape[1])
    return {
        "in_proj.weight": torch.cat([*rows.values(), dt])[list(stored["in_proj"])],
        "conv1d.bias": torch.cat([*biases.values()])[list(stored["conv1d"])],
        "dt_bias": torch.full((mixer.n_heads,), SOFTPLUS_1),
        "A_log": log_decay,
        "D": torch.zeros(mixer.n_heads),
        "gated_norm.weight": torch.ones(mixer.d_ssm),
    }


def _mamba1(
    mixer: Mamba1Config, kv_heads: int, rows: Parts, biases: Parts, log_decay: Tensor
) -> Parts:
    inner, d_model = mixer.d_inner, rows["q"].shape[1]
    stored = list(grouped_rows(mixer, kv_heads)["in_proj"])
    down = torch.randn(mixer.dt_rank, d_model, dtype=torch.float64) / math.sqrt(d_model)
    A_log = log_decay.repeat_interleave(inner // mixer.C_groups)
    return {
        "in_proj.weight": torch.cat([rows["v"], rows["z"]])[stored],
        "conv1d.bias": biases["v"][stored[:inner]],
        "x_proj.weight": torch.cat([down, rows["k"], rows["q"]]),
        "dt_proj.weight": torch.zeros(inner, mixer.dt_rank),
        "dt_proj.bias": torch.full((inner,), SOFTPLUS_1),
        "A_log": A_log[:, None].repeat(1, mixer.d_state),
        "D": torch.zeros(inner),
    }


_RECURRENT: dict[str, Callable[[Any, int, Parts, Parts, Tensor], Parts]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
}


def gate_rows(seen: Inputs, count: int) -> Tensor:
    """Return `count` equal rows, fp64, whose products with the input are nearest to OPEN."""
    d_model = len(seen.mean)
    ridge = RIDGE * seen.moments.trace() / d_model * torch.eye(d_model, dtype=torch.float64)
    row = torch.linalg.solve(seen.moments + ridge, seen.mean)
    return (OPEN * row).expand(count, d_model)


def _head_rms(weight: Tensor, bias: Tensor, heads: int, inputs: Inputs) -> Tensor:
    """Return the root mean square of each head's values, [heads]."""
    spread = ((weight @ inputs.moments) * weight).sum(1)
    squares = spread + 2 * bias * (weight @ inputs.mean) + bias**2
    return squares.unflatten(0, (heads, -1)).mean(1).clamp_min(1e-12).sqrt()
