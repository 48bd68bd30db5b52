"""Canonical names and shapes of a model's weights and states: what readers fill and engines use."""

from __future__ import annotations

import math

from edge.config import ModelConfig
from edge.mixers.base import Shapes

# GroupQueryAttention takes heads of a multiple of 8 values; graphs fill them up with zeros
HEAD_MULTIPLE = 8


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Canonical weight name → shape, in the order they are stored.

    Linear weights are [out, in], convolutions [channels, K].
    """
    shapes: Shapes = {"embedding.weight": (config.vocab_size, config.d_model)}
    for index, layer in enumerate(config.layers):
        width = layer.input_width(config.d_model)
        local = layer.tensor_shapes(config.d_model)
        if layer.norms != "behind":
            local = _norm(config, width) | local
        if layer.norms != "before":
            behind = _norm(config, config.d_model)
            local |= {f"post_{name}": shape for name, shape in behind.items()}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in local.items()}
    shapes |= {
        f"norm_f.{n.removeprefix('norm.')}": s for n, s in _norm(config, config.d_model).items()
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.d_model)
    return shapes


def parameters(config: ModelConfig) -> int:
    """How many numbers the model's weights are, each tensor counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def read_parameters(config: ModelConfig, tokens: int = 1) -> int:
    """How many of them a run of `tokens` reads: of experts those that it chooses, were all as
    likely as each other.
    """
    total = 0.0
    for name, shape in tensor_shapes(config).items():
        first, _, rest = name.partition(".")
        index, _, module = rest.partition(".")
        share = 1.0
        if first == "layers":
            share = config.layers[int(index)].read_share(module.partition(".")[0])
        total += math.prod(shape) * (1 - (1 - share) ** tokens)
    return round(total)


def read_bytes(config: ModelConfig, weight_bytes: int, tokens: int = 1) -> int:
    """Bytes of `weight_bytes` that a run of `tokens` reads, by the share of parameters it reads.

    An embedding that is not the head's matrix too is looked up, not read: a row a token, which is
    left out.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    return weight_bytes * (read_parameters(config, tokens) - looked_up) // parameters(config)


def _norm(config: ModelConfig, width: int) -> Shapes:
    shapes: Shapes = {"norm.weight": (width,)}
    if config.norm.kind == "layernorm":
        shapes["norm.bias"] = (width,)
    return shapes


def recurrent_state_shapes(config: ModelConfig, batch: int = 1) -> Shapes:
    """`layers.i.conv_state` / `layers.i.ssm_state` → shape, batch first (see `edge.mixers`)."""
    return {
        f"layers.{index}.{name}": shape
        for index, layer in enumerate(config.layers)
        for name, shape in layer.recurrent_states(batch).items()
    }


def padded_head_dim(head_dim: int) -> int:
    """How many values a head has in a graph."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def kv_cache_shapes(config: ModelConfig, capacity: int, batch: int = 1) -> Shapes:
    """`layers.i.key_cache` / `layers.i.value_cache` → [batch, n_kv_heads, capacity, head_dim]."""
    return {
        f"layers.{index}.{name}": shape
        for index, layer in enumerate(config.layers)
        for name, shape in layer.kv_caches(capacity, batch).items()
    }


def kv_windows(config: ModelConfig) -> dict[str, int]:
    """KV cache → how many positions a token looks back on in it, its own among them; those of
    layers that look back on all are not here.
    """
    return {
        f"layers.{index}.{name}": layer.looks_back
        for index, layer in enumerate(config.layers)
        if layer.looks_back is not None
        for name in layer.kv_caches(1, 1)
    }
