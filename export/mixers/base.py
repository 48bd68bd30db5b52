"""The base class of a mixer's export. Sizes and states are those of `edge.mixers`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge.export.nodes.builder import F32
from edge.export.nodes.layer import LayerGraph
from edge.export.nodes.products import ProductInput
from edge.export.quantize.layer_plan import LayerPlanner, Matrix
from edge.export.quantize.plan import LayerPlan, Table
from edge.export.training_ops import causal_conv1d_training
from edge.mixers.base import MixerConfig
from edge.plugins.causal_conv1d.reference import causal_conv1d

C = TypeVar("C", bound=MixerConfig)
Fetch = Callable[[str], F32]
Array = NDArray[Any]
State = dict[str, Tensor]


def initial(make: Callable[[], Tensor], *shape: int) -> nn.Parameter:
    """Return a parameter with its first values, or with none on the meta device.

    There PyTorch computes nothing, but would load its compiler to do so, which takes two seconds.
    """
    empty = torch.empty(shape)
    return nn.Parameter(empty if empty.is_meta else make())


class Scale(nn.Module):
    """The learned weight of a norm inside a mixer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


@dataclass(frozen=True)
class Stored:
    """How a floating graph stores one canonical tensor.

    Attributes:
        name: name of the initializer that holds it, perhaps together with others.
        shape: shape of the initializer.
        restore: initializer → canonical tensor.
    """

    name: str
    shape: tuple[int, ...]
    restore: Callable[[Array], Array]


class MixerExport(ABC, Generic[C]):
    """One layer's mixer in PyTorch, in the graph, and in int8. Names are relative to the layer.

    Attributes:
        state_axes: axes of `ssm_states` that may have separate scales in int8.
    """

    state_axes: ClassVar[tuple[int, ...]] = ()

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def module(self, d_model: int, eps: float) -> nn.Module:
        """Return the module, freshly initialised; `eps` is that of the model's norms.

        Its parameters have canonical names. Its arguments are u [B, T, D], the layer's state and
        the position of the first token; it returns y [B, T, D] and the state after.
        """

    @abstractmethod
    def matrices(self, d_model: int) -> dict[str, Matrix]:
        """Return the products of the layer, in the order in which they run."""

    @abstractmethod
    def nodes(self, at: LayerGraph, u: ProductInput) -> str:
        """Add the mixer to a graph and return the name of its output [T, B, D]."""

    def weight(self, name: str, fetch: Fetch) -> F32:
        """Return a weight as the graph has it, joined or padded, from canonical tensors."""
        return fetch(name)

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored | None:
        """Return how a floating graph stores a canonical tensor, or None if it is unchanged.

        The inverse of `weight`, and of how `nodes` changes small weights.
        """
        if name == "conv1d.weight":
            return Stored(name, (shape[1], 1, shape[0]), lambda w: w[:, 0].T)
        return None

    def hindrance(self, table: Table, matrices: Mapping[str, Matrix]) -> str:
        """Return why a layer cannot run on int8 ops throughout, and so not round its ssm_state, if
        a recipe's `table` rounds it; "" if it can.
        """
        return ""

    def plan(self, planner: LayerPlanner) -> LayerPlan:
        """Return how the layer is rounded. Raises ExportError when it cannot follow the recipe."""
        return LayerPlan(planner.products())

    def walks(self, plan: LayerPlan) -> bool:
        """Return whether its scan goes from parent to child, token by token."""
        return False

    def logs(self, plan: LayerPlan) -> bool:
        """Return whether its scan replays tokens logged by earlier runs."""
        return False


class Conv1d(nn.Module):
    """Weights of a causal depthwise convolution: weight [C, K], bias [C] or None."""

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor, conv_state: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve x and apply SiLU; returns y and the new conv_state."""
        run = causal_conv1d_training if torch.is_grad_enabled() else causal_conv1d
        return run(x, conv_state, self.weight, self.bias)
