"""Losses of a linear head, a slice of rows at a time: the logits never exist in full."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        taught: tuple[Tensor, Tensor] | None,
        share: float,
        slice_rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        w = weight.to(dtype)
        teacher = None if taught is None else taught[1].to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden, dtype=dtype)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, hidden.shape[0], slice_rows):
            rows = slice(start, start + slice_rows)
            h, target = hidden[rows].to(dtype), targets[rows, None]
            log_q = F.log_softmax((h @ w.T).float(), dim=-1)
            total -= (1 - share) * log_q.gather(1, target).sum()
            p = None
            if taught is not None and teacher is not None:
                log_p = F.log_softmax((taught[0][rows].to(dtype) @ teacher.T).float(), dim=-1)
                p = log_p.exp()
                total += share * (p * (log_p - log_q)).sum()
            d_logits = log_q.exp_()
            if p is not None:
                d_logits.sub_(p, alpha=share)
            said = torch.full_like(target, share - 1, dtype=torch.float32)
            d = d_logits.scatter_add_(1, target, said).to(dtype)
            d_hidden[rows] = d @ w
            d_weight += (d.T @ h).float()
        ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return (d_hidden * grads[0], d_weight * grads[0], *[None] * 5)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float32,
    slice_rows: int = 256,
) -> Tensor:
    """Σ -log softmax(hidden·weightᵀ)[target], in nats.

    hidden [n, D]; weight [V, D]; targets [n] int64. Products in `dtype`, softmax in fp32. Gradients
    are found in the forward pass.
    """
    total: Tensor = _HeadLoss.apply(hidden, weight, targets, None, 0.0, slice_rows, dtype)
    return total


def taught_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    taught: Tensor,
    teacher: Tensor,
    share: float,
    dtype: torch.dtype = torch.float32,
    slice_rows: int = 256,
) -> Tensor:
    """Σ share·KL(teacher ‖ model) - (1 - share)·log softmax(hidden·weightᵀ)[target], in nats.

    hidden [n, D]; weight [V, D]; targets [n] int64; taught [n, E], the teacher's own hidden, and
    teacher [V, E], its head, which learn nothing. Otherwise as `head_loss`.
    """
    total: Tensor = _HeadLoss.apply(
        hidden, weight, targets, (taught, teacher), share, slice_rows, dtype
    )
    return total
