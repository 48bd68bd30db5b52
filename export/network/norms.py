"""RMSNorm and the gated RMSNorm with their own backward passes, for training.

The reference's maths; rows are taken one at a time on a CPU, so that fp32 intermediates stay in the
cache. Under autocast the result has autocast's dtype, since a Linear reads it and would cast it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def blocks(x: Tensor) -> list[slice]:
    """Slices of the first axis to work on together."""
    block = x.shape[0] if x.is_cuda else 1
    return [slice(start, start + block) for start in range(0, x.shape[0], block)]


def _result_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.result_type(x, weight)


def _scale(h: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(h²) + eps) over the last axis, kept."""
    squares = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_()
    return squares.div_(h.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(d: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Gradient of h·scale(h) for its input: scale · (d - normed · mean(d · normed)). Reuses d."""
    along = (d * normed).mean(-1, keepdim=True)
    return d.addcmul_(normed, along, value=-1).mul_(scale)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x, dtype=dtype)
        for rows in blocks(x):
            h = x[rows].float()
            y[rows] = (h * _scale(h, eps)).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx, d_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for rows in blocks(x):
            h, d = x[rows].float(), grads[0][rows].float()
            scale = _scale(h, ctx.eps)
            normed = h * scale
            d_weight += (d * normed).flatten(0, -2).sum(0)
            dx[rows] = _norm_backward(d * weight, normed, scale)
        return dx, d_weight.to(weight.dtype), None, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(y, z, weight)
        ctx.eps, ctx.groups = eps, groups
        out = torch.empty_like(y, dtype=dtype)
        for rows in blocks(y):
            h = F.silu(z[rows].float()).mul_(y[rows]).unflatten(-1, (groups, -1))
            out[rows] = h.mul_(_scale(h, eps)).flatten(-2).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        y, z, weight = ctx.saved_tensors
        dy, dz = torch.empty_like(y), torch.empty_like(z)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in blocks(y):
            gate, y32, d = z[rows].float(), y[rows].float(), grads[0][rows].float()
            silu = F.silu(gate)
            h = (silu * y32).unflatten(-1, (ctx.groups, -1))
            scale = _scale(h, ctx.eps)
            normed = h.mul_(scale)
            d_weight += (d * normed.flatten(-2)).flatten(0, -2).sum(0)
            split = (d * weight).unflatten(-1, (ctx.groups, -1))
            d_h = _norm_backward(split, normed, scale).flatten(-2)
            dy[rows] = silu.mul_(d_h)
            dz[rows] = torch.ops.aten.silu_backward(d_h.mul_(y32), gate)
        return dy, dz, d_weight.to(weight.dtype), None, None, None


def rms_norm_training(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`edge.plugins.reference.rms_norm`. Shapes as there, with an axis before the last."""
    y: Tensor = _RmsNorm.apply(x, weight, eps, _result_dtype(x, weight))
    return y


def gated_rms_norm_training(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """`edge.plugins.reference.gated_rms_norm`. Shapes as there, with an axis before the last."""
    out: Tensor = _GatedRmsNorm.apply(y, z, weight, eps, groups, _result_dtype(y, weight))
    return out
