"""Share parameters among heads that shared a key and a value in attention: their rows of in_proj
and of the convolution are one parameter, which is repeated on use.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from edge.export.checkpoint.families.mamba_in_llama import Mixer, grouped_rows
from edge.export.network import Network


class RepeatedRows(nn.Module):
    """Repeats rows of a parameter; rows [n] says which one each row of the weight is."""

    rows: Tensor
    first: Tensor

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("rows", torch.tensor(rows), persistent=False)
        first = [rows.index(row) for row in range(max(rows) + 1)]
        self.register_buffer("first", torch.tensor(first), persistent=False)

    def forward(self, own: Tensor) -> Tensor:
        return own[self.rows]

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight[self.first]


def share_rows(mixer: nn.Module, config: Mixer, kv_heads: int) -> None:
    """Reduce a mixer's in_proj and conv1d to the parameters of `kv_heads` heads of x and B."""
    for module, rows in grouped_rows(config, kv_heads).items():
        holder = mixer.get_submodule(module)
        if len(set(rows)) < len(rows):
            for name in [name for name, _ in holder.named_parameters()]:
                parametrize.register_parametrization(holder, name, RepeatedRows(rows))


def share(network: Network, name: str, rows: tuple[int, ...]) -> None:
    """Share the rows of one tensor of a network, by its canonical name."""
    module, kind = network.holder(name)
    parametrize.register_parametrization(module, kind, RepeatedRows(rows))


@torch.no_grad()
def set_tensor(mixer: nn.Module, name: str, value: Tensor) -> None:
    """Set a mixer's tensor, whether it is a parameter or computed from one."""
    module, _, kind = name.rpartition(".")
    holder = mixer.get_submodule(module)
    if parametrize.is_parametrized(holder, kind):
        setattr(holder, kind, value.to(getattr(holder, kind)))
    else:
        holder.get_parameter(kind).copy_(value)
