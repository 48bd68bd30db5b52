"""A Mamba-2 mixer made of an attention layer, near linear attention: C, B, x and the output are the
projections of q, k, v and o (The Mamba in the Llama, section 2.2, figure 1 and algorithm 1).

What attention does not have is chosen so that it changes little at first:

    D        0, and the convolution takes the newest token alone;
    dt       1 whatever the token, and A forgets slowly: a head remembers 1/A tokens;
    gate     silu(z) = 1: z is what a linear map of the input comes nearest to a constant with, for
             normed inputs have a part that is always there;
    SiLU     stands behind x, B and C: rows are scaled until values are small, where it is linear.
             The gated norm that follows takes any scale out again, of every head.

The gated norm's weight is then one number, for which the outputs come nearest to the attention's
(`Student.initialise`). What is left of the difference to attention is its softmax and RoPE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from edge.config import AttentionConfig, Mamba2Config
from edge.export.checkpoint.families.mamba_in_llama import grouped_rows

OPEN = 1.2784645  # silu of it is 1
X_SIZE, BC_SIZE = 0.3, 0.5  # root mean squares before SiLU
MEMORY = (4.0, 4096.0)  # tokens, of the shortest head and of the longest
RIDGE = 1e-3


@dataclass
class Inputs:
    """What a mixer reads on some text: its mean [D] and second moments [D, D], fp64 on the CPU."""

    mean: Tensor
    moments: Tensor

    @classmethod
    def of(cls, u: Tensor) -> Inputs:
        """u [..., D]."""
        rows = u.flatten(0, -2).double()
        return cls(rows.mean(0).cpu(), (rows.T @ rows / len(rows)).cpu())


def from_attention(
    attention: AttentionConfig, mixer: Mamba2Config, weights: dict[str, Tensor], seen: Inputs
) -> dict[str, Tensor]:
    """The mixer's tensors in fp32, by their names in the layer.

    weights: of the attention, by theirs. Biases of q, k and v become the convolution's.
    """
    heads, dim, kv = attention.n_heads, attention.head_dim, attention.n_kv_heads
    sizes = {"v": (kv, X_SIZE), "k": (kv, BC_SIZE), "q": (heads, BC_SIZE)}
    rows, biases = [gate_rows(seen, mixer.d_inner)], []
    for part, (count, size) in sizes.items():
        weight = weights[f"{part}_proj.weight"].double()
        bias = weights.get(f"{part}_proj.bias", weight.new_zeros(len(weight))).double()
        scale = size / _size(weight, bias, count, seen)
        rows.append(weight * scale.repeat_interleave(dim)[:, None])
        biases.append(bias * scale.repeat_interleave(dim))
    rows.append(torch.zeros(heads, len(seen.mean), dtype=torch.float64))
    repeated = grouped_rows(mixer, kv)
    taps = torch.zeros(mixer.conv_channels, mixer.d_conv)
    taps[:, -1] = 1
    return {
        "in_proj.weight": torch.cat(rows)[list(repeated["in_proj"])].float(),
        "conv1d.weight": taps,
        "conv1d.bias": torch.cat(biases)[list(repeated["conv1d"])].float(),
        "dt_bias": torch.full((heads,), math.log(math.expm1(1.0))),
        "A_log": -torch.linspace(math.log(MEMORY[0]), math.log(MEMORY[1]), heads),
        "D": torch.zeros(heads),
        "gated_norm.weight": torch.ones(mixer.d_ssm),
        "out_proj.weight": weights["o_proj.weight"].float(),
    }


def gate_rows(seen: Inputs, count: int) -> Tensor:
    """`count` equal rows, fp64, whose products with the input are nearest to OPEN."""
    wide = len(seen.mean)
    ridge = RIDGE * seen.moments.trace() / wide * torch.eye(wide, dtype=torch.float64)
    row = torch.linalg.solve(seen.moments + ridge, seen.mean)
    return (OPEN * row).expand(count, wide)


def _size(weight: Tensor, bias: Tensor, heads: int, seen: Inputs) -> Tensor:
    """Root mean square of each head's values, [heads]."""
    spread = ((weight @ seen.moments) * weight).sum(1)
    squares = spread + 2 * bias * (weight @ seen.mean) + bias**2
    return squares.unflatten(0, (heads, -1)).mean(1).clamp_min(1e-12).sqrt()
