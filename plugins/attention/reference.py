"""Rotary embedding and causal attention over a KV cache."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.soft_cap.reference import soft_cap


def rope(x: Tensor, positions: Tensor, inverse: Tensor) -> Tensor:
    """Rotate the first values of each head, half against half (RoFormer, equation 34).

    x [B, heads, T, P]; positions [T] or [B, T], integer; inverse frequencies f32 [dim/2], of
    `edge.rope`.
    """
    angle = positions.float()[..., None] * inverse
    angle = angle if angle.dim() == 2 else angle[:, None]
    return rope_tables(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


def rope_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` with the cos and sin of its angles given: each [T, dim/2] or [B, 1, T, dim/2]."""
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
    """softmax(scale·q·kᵀ)·v with grouped heads; scale is 1/√P unless it is given.

    q [B, n_heads, T, P]; k, v [B, n_kv_heads, S, P] with S = past + T; mask [T, S] or [B, 1, T, S],
    True where a query may look, default causal (query t sees keys up to S-T+t); or of floats,
    added to the scores. With a `softcap` these are first softcap·tanh(score/softcap).
    """
    steps, seen = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(steps, seen, dtype=torch.bool, device=q.device).tril(seen - steps)
    if softcap:
        return _capped(q, k, v, mask, scale or q.shape[-1] ** -0.5, softcap)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    k, v = (m.repeat_interleave(q.shape[1] // m.shape[1], 1) for m in (k, v))
    scores = soft_cap(q @ k.mT * scale, softcap)
    hides = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask
    return scores.softmax(-1) @ v


def rope_node(x: Tensor, cos: Tensor, sin: Tensor, heads: int, head_dim: int) -> Tensor:
    """The op as stated."""
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
    """The op as stated; `bias` says what a window hides."""
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


attention_f16_node = attention_node  # the caches' type says how k and v are kept
