"""Canonical names and shapes of a model's weights and states: what readers fill and engines use."""

from __future__ import annotations

import math

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig

Shapes = dict[str, tuple[int, ...]]

# GroupQueryAttention takes heads of a multiple of 8 values; graphs fill them up with zeros
HEAD_MULTIPLE = 8


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Canonical weight name → shape, in the order they are stored.

    Linear weights are [out, in], convolutions [channels, K].
    """
    shapes: Shapes = {"embedding.weight": (config.vocab_size, config.d_model)}
    for index, layer in enumerate(config.layers):
        local = _norm(config) | _layer_shapes(layer, config.d_model)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in local.items()}
    shapes |= {f"norm_f.{n.removeprefix('norm.')}": s for n, s in _norm(config).items()}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.d_model)
    return shapes


def parameters(config: ModelConfig) -> int:
    """How many numbers the model's weights are, each tensor counted once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def _norm(config: ModelConfig) -> Shapes:
    shapes: Shapes = {"norm.weight": (config.d_model,)}
    if config.norm.kind == "layernorm":
        shapes["norm.bias"] = (config.d_model,)
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (rows, columns)}
    if bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def _conv(channels: int, width: int, bias: bool) -> Shapes:
    return _linear("conv1d", channels, width, bias)


def _layer_shapes(
    layer: Mamba1Config | Mamba2Config | AttentionConfig | MlpConfig, d_model: int
) -> Shapes:
    if isinstance(layer, Mamba1Config):
        return _mamba1(layer, d_model)
    if isinstance(layer, Mamba2Config):
        return _mamba2(layer, d_model)
    if isinstance(layer, AttentionConfig):
        q, kv = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        return (
            _linear("q_proj", q, d_model, layer.qkv_bias)
            | _linear("k_proj", kv, d_model, layer.qkv_bias)
            | _linear("v_proj", kv, d_model, layer.qkv_bias)
            | _linear("o_proj", d_model, q, layer.out_bias)
        )
    gate = _linear("gate_proj", layer.d_intermediate, d_model, layer.bias) if layer.gated else {}
    return (
        gate
        | _linear("up_proj", layer.d_intermediate, d_model, layer.bias)
        | _linear("down_proj", d_model, layer.d_intermediate, layer.bias)
    )


def _mamba1(layer: Mamba1Config, d_model: int) -> Shapes:
    inner, state, rank = layer.d_inner, layer.d_state, layer.dt_rank
    return (
        _linear("in_proj", 2 * inner, d_model, layer.proj_bias)
        | _conv(inner, layer.d_conv, layer.conv_bias)
        | _linear("x_proj", rank + 2 * state, inner, False)
        | _linear("dt_proj", inner, rank, True)
        | {"A_log": (inner, state), "D": (inner,)}
        | _linear("out_proj", d_model, inner, layer.proj_bias)
    )


def _mamba2(layer: Mamba2Config, d_model: int) -> Shapes:
    shapes = (
        _linear("in_proj", layer.in_proj_rows, d_model, layer.proj_bias)
        | _conv(layer.conv_channels, layer.d_conv, layer.conv_bias)
        | {"dt_bias": (layer.n_heads,), "A_log": (layer.n_heads,), "D": (layer.n_heads,)}
    )
    if layer.gated_norm:
        shapes["gated_norm.weight"] = (layer.d_ssm,)
    return shapes | _linear("out_proj", d_model, layer.d_inner, layer.proj_bias)


def recurrent_state_shapes(config: ModelConfig, batch: int = 1) -> Shapes:
    """`layers.i.conv_state` / `layers.i.ssm_state` → shape, batch first (see `edge.config`)."""
    shapes: Shapes = {}
    for index, layer in enumerate(config.layers):
        if isinstance(layer, Mamba1Config | Mamba2Config):
            name = f"layers.{index}"
            shapes[f"{name}.conv_state"] = (batch, layer.d_conv - 1, layer.conv_channels)
            if isinstance(layer, Mamba1Config):
                shapes[f"{name}.ssm_state"] = (batch, layer.d_state, layer.d_inner)
            else:
                shapes[f"{name}.ssm_state"] = (batch, layer.n_heads, layer.head_dim, layer.d_state)
    return shapes


def padded_head_dim(head_dim: int) -> int:
    """How many values a head has in a graph."""
    return -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE


def kv_cache_shapes(config: ModelConfig, capacity: int, batch: int = 1) -> Shapes:
    """`layers.i.key_cache` / `layers.i.value_cache` → [batch, n_kv_heads, capacity, head_dim]."""
    return {
        f"layers.{index}.{which}_cache": (batch, layer.n_kv_heads, capacity, layer.head_dim)
        for index, layer in enumerate(config.layers)
        if isinstance(layer, AttentionConfig)
        for which in ("key", "value")
    }
