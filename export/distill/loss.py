"""Losses of a linear head, a slice of rows at a time, so that logits never exist in full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.soft_cap.reference import soft_cap


@dataclass(frozen=True)
class Shares:
    """Weights of the losses of a model's distribution q against its teacher's p. They sum to 1.

    Attributes:
        divergence: weight of KL(p ‖ q).
        overlap: weight of 1 - Σ min(p, q), the share of tokens drafted from q that verifying
            against p rejects (DistillSpec, arXiv 2310.08461). Its gradient nearly vanishes where q
            is far from p.
        choice: weight of -log q of the teacher's likeliest token, for greedy drafts.
        label: weight of -log q of the token that came next (The Mamba in the Llama, equation 2).
    """

    divergence: float = 0.8
    overlap: float = 0.0
    choice: float = 0.2
    label: float = 0.0


SHARES = Shares()
SLICE, GPU_SLICE = 64, 1024  # rows of logits held at once


class _HeadLoss(torch.autograd.Function):
    """Computes the gradients with respect to hidden and weight in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        slice_rows: int,
        dtype: torch.dtype,
        softcap: float | None,
        judge: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """`judge(rows, logits)` returns their loss, and its gradient with respect to the logits."""
        w = weight.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden, dtype=dtype)
        needs_d_weight = ctx.needs_input_grad[1]  # its gradient takes a third of the products
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_d_weight else None
        for start in range(0, hidden.shape[0], slice_rows):
            rows = slice(start, start + slice_rows)
            count = min(slice_rows, hidden.shape[0] - start)
            h = filled(hidden[rows].to(dtype), slice_rows)
            logits = capped((h @ w.T)[:count].float(), softcap)
            loss, d_logits = judge(rows, logits)
            total += loss
            if softcap is not None:
                d_logits = d_logits * (1 - (logits / softcap).square())
            d = filled(d_logits.to(dtype), slice_rows)
            d_hidden[rows] = (d @ w)[:count]
            if d_weight is not None:
                d_weight += (d.T @ h).float()
        ctx.save_for_backward(
            d_hidden.to(hidden.dtype), None if d_weight is None else d_weight.to(weight.dtype)
        )
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return (
            d_hidden * grads[0], None if d_weight is None else d_weight * grads[0], *[None] * 4,
        )  # fmt: skip


def filled(rows: Tensor, count: int) -> Tensor:
    """Append rows of zeros up to `count` rows.

    On a CPU, torch keeps what it compiled for every shape of a product in bf16, megabytes each. A
    last slice of another length in every batch would take gigabytes within an hour.
    """
    return F.pad(rows, (0, 0, 0, count - rows.shape[0]))


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype = torch.float32,
    slice_rows: int = 256,
    softcap: float | None = None,
) -> Tensor:
    """Return Σ -log softmax(hidden·weightᵀ)[target], in nats.

    hidden [n, D]; weight [V, D]; targets [n] int64; softcap: bound that logits approach, or None.
    Products run in `dtype`, softmax in fp32. Gradients are computed in the forward pass.
    """

    def judge(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = F.log_softmax(logits, dim=-1)
        target = targets[rows, None]
        loss = -log_q.gather(1, target).sum()
        return loss, log_q.exp_().scatter_add_(1, target, -log_q.new_ones(target.shape))

    total: Tensor = _HeadLoss.apply(hidden, weight, slice_rows, dtype, softcap, judge)
    return total


def taught_loss(
    hidden: Tensor,
    weight: Tensor,
    taught: Tensor,
    teacher: Tensor,
    shares: Shares,
    dtype: torch.dtype = torch.float32,
    slice_rows: int | None = None,
    targets: Tensor | None = None,
    softcaps: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """Return the sum over rows of the losses weighted by `shares`, in nats.

    hidden [n, D]; weight [V, D]; taught [n, E] and teacher [V, E]: the teacher's hidden and head,
    which get no gradient; targets [n] int64, needed only for `shares.label`; softcaps: the model's
    and the teacher's. Otherwise as `head_loss`.
    """
    slice_rows = slice_rows or (GPU_SLICE if hidden.is_cuda else SLICE)
    t, (student_cap, teacher_cap) = teacher.to(dtype), softcaps

    def judge(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        states = taught[rows]
        products = filled(states.to(dtype), slice_rows) @ t.T
        teacher_logits = capped(products[: len(states)].float(), teacher_cap)
        return taught_logits(
            teacher_logits, logits, shares, None if targets is None else targets[rows]
        )

    total: Tensor = _HeadLoss.apply(hidden, weight, slice_rows, dtype, student_cap, judge)
    return total


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return logits soft-capped as in Gemma 2 (arXiv 2408.00118, section 2), or unchanged."""
    return logits if softcap is None else soft_cap(logits, softcap)


def taught_logits(
    theirs: Tensor, ours: Tensor, shares: Shares, targets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss of logits `ours` [n, V] against the teacher's, and its gradient with respect
    to `ours`.
    """
    choice = theirs.argmax(-1, keepdim=True)
    log_p, log_q = F.log_softmax(theirs, dim=-1), F.log_softmax(ours, dim=-1)
    p = log_p.exp()
    loss = -shares.choice * log_q.gather(1, choice).sum()
    loss += shares.divergence * torch.dot(p.flatten(), log_p.sub_(log_q).flatten())
    if shares.label:
        assert targets is not None
        loss -= shares.label * log_q.gather(1, targets[:, None]).sum()
    q = log_q.exp_()
    gradient = q * (shares.divergence + shares.choice + shares.label)
    gradient.sub_(p, alpha=shares.divergence)
    choice_gradient = torch.full_like(choice, -shares.choice, dtype=torch.float32)
    gradient.scatter_add_(1, choice, choice_gradient)
    if shares.label:
        assert targets is not None
        gradient.scatter_add_(1, targets[:, None], torch.full_like(choice_gradient, -shares.label))
    if shares.overlap:
        low = torch.where(q < p, q, 0.0)  # the terms of Σ min(p, q) that depend on q
        gradient.add_(torch.addcmul(-low, q, low.sum(-1, keepdim=True)), alpha=shares.overlap)
        loss += shares.overlap * (len(p) - torch.minimum(p, q).sum())
    return loss, gradient
