"""Canonical names and shapes of a model's weights and states, for readers and engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge.config import ModelConfig
from edge.mixers.base import Shapes

# GroupQueryAttention needs head sizes that are multiples of 8; graphs pad heads with zeros
HEAD_MULTIPLE = 8


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return canonical weight name → shape, in storage order.

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
    """Return the number of parameters, each tensor counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def read_parameters(config: ModelConfig, tokens: int = 1) -> int:
    """Return the number of parameters that a run of `tokens` reads.

    Of the experts it is the expected number, all experts being equally likely.
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
    """Return the bytes of `weight_bytes` that a run of `tokens` reads, by its parameters' share.

    Of an embedding only one row per token is read, besides the rows that are the head too.
    """
    rows = config.vocab_size - (config.head_size if config.tie_embeddings else 0)
    looked_up = rows * config.d_model
    return weight_bytes * (read_parameters(config, tokens) - looked_up) // parameters(config)


def _norm(config: ModelConfig, width: int) -> Shapes:
    shapes: Shapes = {"norm.weight": (width,)}
    if config.norm.kind == "layernorm":
        shapes["norm.bias"] = (width,)
    return shapes


def recurrent_state_shapes(config: ModelConfig, batch: int = 1) -> Shapes:
    """Return `layers.i.conv_state` / `layers.i.ssm_state` → shape, batch first."""
    return {
        f"layers.{index}.{name}": shape
        for index, layer in enumerate(config.layers)
        for name, shape in layer.recurrent_states(batch).items()
    }


def head_columns(head_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return each id's column of a product of `head_ids`, i32 [V]; -1 for ids not among them."""
    columns = np.full(vocab_size, -1, np.int32)
    columns[[*head_ids]] = np.arange(len(head_ids))
    return columns


def padded_head_dim(head_dim: int) -> int:
    """Return the size of a head in a graph, padding included."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def kv_cache_shapes(config: ModelConfig, capacity: int, batch: int = 1) -> Shapes:
    """Return `layers.i.{key,value}_cache` → [batch, n_kv_heads, capacity, head_dim]."""
    return {
        f"layers.{index}.{name}": shape
        for index, layer in enumerate(config.layers)
        for name, shape in layer.kv_caches(capacity, batch).items()
    }


def kv_windows(config: ModelConfig) -> dict[str, int]:
    """Return KV cache → window: the number of positions a token attends to, its own included.

    Caches of layers that attend to all positions are left out.
    """
    return {
        f"layers.{index}.{name}": layer.looks_back
        for index, layer in enumerate(config.layers)
        if layer.looks_back is not None
        for name in layer.kv_caches(1, 1)
    }
