"""Names and sizes of the matrices that plans speak of, as the graph has them."""

from __future__ import annotations

from edge.config import (
    AttentionConfig,
    Mamba1Config,
    Mamba2Config,
    Mixer,
    MlpConfig,
    ModelConfig,
)
from edge.tensors import padded_head_dim

Matrices = dict[str, tuple[int, int]]
# What Mamba-2's out_proj reads beside an MLP; the MLP without a gate.
_USUAL = {"joined": "gated", "activated": "gated", "up_proj": "gate_up_proj"}


def layer_matrices(layer: Mixer, d_model: int) -> Matrices:
    """The products of a layer, in the order they run: name → (rows N, columns K)."""
    if isinstance(layer, Mamba1Config):
        inner, rank = layer.d_inner, layer.dt_rank
        return {
            "in_proj": (2 * inner, d_model),
            "x_proj": (rank + 2 * layer.d_state, inner),
            "dt_proj": (inner, rank),
            "out_proj": (d_model, inner),
        }
    if isinstance(layer, Mamba2Config):
        return {"in_proj": (layer.in_proj_rows, d_model), "out_proj": (d_model, layer.d_inner)}
    if isinstance(layer, AttentionConfig):
        wide = padded_head_dim(layer.head_dim)
        heads = layer.n_heads + 2 * layer.n_kv_heads
        return {"qkv_proj": (heads * wide, d_model), "o_proj": (d_model, layer.n_heads * wide)}
    assert isinstance(layer, MlpConfig)
    wide = layer.d_intermediate
    up = {"gate_up_proj": (2 * wide, d_model)} if layer.gated else {"up_proj": (wide, d_model)}
    return up | {"down_proj": (d_model, wide)}


def inputs(layer: Mixer) -> dict[str, str]:
    """Matrix → the value of the fp32 graph that it multiplies (dt_proj: the first part of dbc)."""
    if isinstance(layer, Mamba1Config):
        return {"in_proj": "normed", "x_proj": "conv", "dt_proj": "dbc", "out_proj": "scan"}
    if isinstance(layer, Mamba2Config):
        return {"in_proj": "normed", "out_proj": "joined" if layer.d_mlp else "gated"}
    if isinstance(layer, AttentionConfig):
        return {"qkv_proj": "normed", "o_proj": "attended_time"}
    assert isinstance(layer, MlpConfig)
    if layer.gated:
        return {"gate_up_proj": "normed", "down_proj": "gated"}
    return {"up_proj": "normed", "down_proj": "activated"}


def usual(name: str) -> str:
    """The name that a recipe's table has for a matrix or value of a layer in a rarer form."""
    return _USUAL.get(name, name)


def sources(matrix: str) -> tuple[str, ...]:
    """The checkpoint's matrices whose rows a matrix of the graph joins."""
    joined = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    return joined.get(matrix, (matrix,))


def head_matrix(config: ModelConfig) -> str:
    """The weight that makes logits."""
    return "embedding.weight" if config.tie_embeddings else "lm_head.weight"
