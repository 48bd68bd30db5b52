"""Rotary embedding and causal attention over a KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rope(x: Tensor, positions: Tensor, theta: float, dim: int) -> Tensor:
    """Rotate the first `dim` values of each head, half against half (RoFormer, equation 34).

    x [B, heads, T, P]; positions [T] or [B, T], integer.
    """
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
    angle = positions.float()[..., None] * inverse
    angle = angle if angle.dim() == 2 else angle[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x[..., : dim // 2], x[..., dim // 2 : dim], x[..., dim:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q·kᵀ/√P)·v with grouped heads.

    q [B, n_heads, T, P]; k, v [B, n_kv_heads, S, P] with S = past + T; mask [T, S] or [B, 1, T, S],
    True where a query may look, default causal (query t sees keys up to S-T+t).
    """
    steps, seen = q.shape[2], k.shape[2]
    if mask is None:
        mask = torch.ones(steps, seen, dtype=torch.bool, device=q.device).tril(seen - steps)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
