"""Rotary embedding and causal attention over a KV cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.soft_cap.reference import soft_cap


def rope(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """Rotate the first values of each head, first half against second (RoFormer, equation 34).

    x [B, heads, T, P]; positions [T] or [B, T], integer; inverse frequencies f32 [dim/2], from
    `edge.rope`.
    """
    angle = positions.float()[..., None] * inverse
    angle = angle if angle.dim() == 2 else angle[:, None]
    return rope_tables(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


def rope_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `rope` with given cos and sin of its angles, each [T, dim/2] or [B, 1, T, dim/2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return softmax(scale·q·kᵀ)·v with grouped heads.

    q [B, n_heads, T, P]; k, v [B, n_kv_heads, S, P] with S = past + T. mask [T, S] or [B, 1, T, S]
    is True where a query may attend, or holds floats that are added to the scores; the default is
    causal (query t attends to keys up to S-T+t). scale defaults to 1/√P. With a `softcap`, scores
    become softcap·tanh(score/softcap) before the mask is added.
    """
    steps, slots = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(steps, slots, dtype=torch.bool, device=q.device).tril(slots - steps)
    if softcap:
        return _softcapped_attention(q, k, v, mask, scale or q.shape[-1] ** -0.5, softcap)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _softcapped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    k, v = (m.repeat_interleave(q.shape[1] // m.shape[1], 1) for m in (k, v))
    scores = soft_cap(q @ k.mT * scale, softcap)
    is_boolean = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if is_boolean else scores + mask
    return scores.softmax(-1) @ v


def rope_node(x: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> Tensor:
    """Apply RoPE as the op is stated."""
    by_head = x.unflatten(-1, (heads, head_dim)).transpose(1, 2)
    return rope_tables(by_head, cos, sin).transpose(1, 2).flatten(-2)


def attention_node(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    total: Tensor,
    bias: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply attention as the op is stated. `bias` masks the slots outside a window."""
    end, steps = int(total), q.shape[1]
    if q.shape[0] > 1 and 1 < steps < end:
        raise ValueError("several sequences of several tokens need empty caches")

    def split(x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, head_dim)).transpose(1, 2)

    caches = (key_cache.clone(), value_cache.clone())
    for cache, new in zip(caches, (k, v), strict=True):
        cache[:, :, end - steps : end] = split(new, kv_heads)
    keys, values = (cache[:, :, :end].to(q.dtype) for cache in caches)
    y = attention(split(q, heads), keys, values, bias, scale, softcap)
    return y.transpose(1, 2).flatten(-2), *caches


attention_f16_node = attention_node  # the type of the caches determines how k and v are stored
