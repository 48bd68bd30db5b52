"""The network in PyTorch, for any `ModelConfig`: it trains, checkpoints load into it, and engines
must match it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge.config import ModelConfig, NormConfig
from edge.export.mixers import mixer_of
from edge.export.mixers.base import State
from edge.export.training_ops import rms_norm_training
from edge.mixers.base import MixerConfig, Shapes
from edge.plugins.expand_logits.reference import expand_logits
from edge.plugins.norm.reference import layer_norm, rms_norm
from edge.plugins.soft_cap.reference import soft_cap
from edge.tensors import head_columns, tensor_shapes


@dataclass
class NetworkState:
    """The network's state: a dict of tensors per layer, and the number of tokens seen so far."""

    layers: list[State] = field(default_factory=list)
    position: int = 0


class Norm(nn.Module):
    """RMSNorm or LayerNorm over d_model."""

    def __init__(self, config: NormConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return layer_norm(x, self.weight, self.bias, self.config.eps)
        norm = rms_norm_training if torch.is_grad_enabled() else rms_norm
        return norm(x, self.weight, self.config.eps)


class Layer(nn.Module):
    """x + mixer(norm(read)), with norms placed as the mixer's `norms` says.

    `read` is x, except in parallel layers and layers aside of the stream. The mixer's canonical
    parameter names have no `mixer.`: they follow the layer's name directly.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        layer, width = config.layers[index], config.d_model
        identity = nn.Identity()
        self.norm = (
            identity if layer.norms == "behind" else Norm(config.norm, layer.input_width(width))
        )
        self.mixer = mixer_of(layer).module(width, config.norm.eps)
        self.post_norm = identity if layer.norms == "before" else Norm(config.norm, width)

    def forward(
        self, x: Tensor, state: State, position: int, read: Tensor | None = None
    ) -> tuple[Tensor, State]:
        y, state = self.mixer(self.norm(x if read is None else read), state, position)
        return x + self.post_norm(y), state


def empty_state(layer: MixerConfig, batch: int) -> Shapes:
    """Return the shapes of a layer's state before any token: KV caches have length 0."""
    return layer.recurrent_states(batch) | layer.kv_caches(0, batch)


def through(
    config: ModelConfig, layers: Iterable[tuple[nn.Module, State]], x: Tensor, position: int
) -> tuple[Tensor, list[State]]:
    """Run embedded tokens x [B, T, D] through `layers`, pairs of a layer and its state.

    `position` is that of x's first token. Returns the output and the states after it.
    """
    states: list[State] = []
    previous = embedded = x  # input of the previous layer, and of the first
    aside: Tensor | None = None
    for index, (layer, layer_state) in enumerate(layers):
        if config.layers[index].is_aside:
            layer_input = torch.cat([x, embedded], -1) if aside is None else aside
            aside, state = layer(x.new_zeros(()), layer_state, position, layer_input)
        else:
            layer_input = previous if config.parallel(index) else x if aside is None else x + aside
            previous, aside, (x, state) = x, None, layer(x, layer_state, position, layer_input)
        states.append(state)
    return x, states


def head_logits(config: ModelConfig, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [..., V] for the final hidden [..., D] and the head's matrix [V, D]."""
    ids, cap = config.head_ids, config.logits_softcap
    if ids is not None:
        weight = weight[torch.tensor(ids, device=weight.device)]
    logits = F.linear(hidden, weight)
    if cap is not None:
        logits = soft_cap(logits, cap)
    if ids is None:
        return logits
    columns = torch.from_numpy(head_columns(ids, config.vocab_size))
    return expand_logits(logits, columns.to(logits.device))


class Network(nn.Module):
    """Logits for tokens, with explicit state.

    Parameter names are the canonical ones of `edge.tensors`, with `mixer.` after `layers.i.`;
    `load_canonical` and `canonical_tensors` translate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(len(config.layers)))
        self.norm_f = Norm(config.norm, config.d_model)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )

    def initial_state(self, batch: int = 1) -> NetworkState:
        """Return the state before any token: zeros, and KV caches of length 0."""
        weight = self.embedding.weight
        layers: list[State] = []
        for layer in self.config.layers:
            state = {}
            for name, shape in empty_state(layer, batch).items():
                dtype = torch.float32 if name == "ssm_state" else weight.dtype
                state[name] = torch.zeros(shape, dtype=dtype, device=weight.device)
            layers.append(state)
        return NetworkState(layers)

    def forward(
        self, tokens: Tensor, state: NetworkState | None = None
    ) -> tuple[Tensor, NetworkState]:
        """Return logits [B, T, V] for tokens [B, T] and the state after; leaves `state` as is."""
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state

    def hidden(
        self, tokens: Tensor, state: NetworkState | None = None
    ) -> tuple[Tensor, NetworkState]:
        """Return the final normed hidden [B, T, D] for tokens [B, T], and the state after."""
        state = state or self.initial_state(tokens.shape[0])
        x = self.embedding(tokens)
        layers = zip(self.layers, state.layers, strict=True)
        x, after = through(self.config, layers, x, state.position)
        normed: Tensor = self.norm_f(x)
        return normed, NetworkState(after, state.position + tokens.shape[1])

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, D]; the embedding's where they are tied."""
        return (self.lm_head or self.embedding).weight

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for the final hidden [..., D]."""
        return head_logits(self.config, hidden, self.head_weight)

    def canonical_tensors(self) -> dict[str, Tensor]:
        """Return canonical name → parameter, in the order of `edge.tensors.tensor_shapes`."""
        return {name: self._tensor(name) for name in tensor_shapes(self.config)}

    def _tensor(self, name: str) -> Tensor:
        """Return a parameter by canonical name, or the tensor computed in its place."""
        tensor: Tensor = getattr(*self.holder(name))
        return tensor

    def holder(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that holds the parameter of a canonical name, and its name there."""
        path = re.sub(r"^(layers\.\d+)\.(?!(?:post_)?norm\.)", r"\1.mixer.", name)
        module, _, kind = path.rpartition(".")
        return self.get_submodule(module), kind

    @torch.no_grad()
    def load_canonical(self, tensors: dict[str, Tensor]) -> None:
        """Copy tensors in by canonical name; every name must be present with its shape."""
        for name, parameter in self.canonical_tensors().items():
            parameter.copy_(tensors[name])
