"""Ops of `edge.plugins` for training and long prefills in PyTorch: Mamba-2's scan in parallel form,
and Mamba's scan, the causal convolution and the norms with their own backward passes.

They compute what the references do and are tested against them. Plain autograd of the convolution's
shifted sums costs a quarter of a small model's training step on a CPU, and that of Mamba's scan
keeps every intermediate of every token. There, rows are processed
one at a time so that fp32 intermediates stay in the cache. Under autocast a norm's result has
autocast's dtype, because the Linear that reads it would cast it anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan_heads_chunked(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan as matrix products within chunks (SSD, Mamba-2 section 6, listing 1).

    Shapes as in `selective_scan_heads`.
    """
    batch, steps, heads, _ = x.shape
    groups = B.shape[2]
    delta = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    log_decay = delta * -torch.exp(A_log.float())
    skip = D.to(x.dtype)[:, None] * x
    scaled = x * delta[..., None].to(x.dtype)

    pad = -steps % chunk
    if pad:
        scaled, log_decay = F.pad(scaled, (0, 0, 0, 0, 0, pad)), F.pad(log_decay, (0, 0, 0, pad))
        B, C = F.pad(B, (0, 0, 0, 0, 0, pad)), F.pad(C, (0, 0, 0, 0, 0, pad))
    # b batch, c chunk, l/s position in chunk, g group, r head in group, p head_dim, n state
    scaled = scaled.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2, 5)
    log_decay = (
        log_decay.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)
    )
    B = B.unflatten(1, (-1, chunk)).transpose(2, 3)
    C = C.unflatten(1, (-1, chunk)).transpose(2, 3)

    total = log_decay.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    scores = (C @ B.transpose(-1, -2))[:, :, :, None] * between.to(x.dtype)
    y = scores @ scaled

    to_end = (total[..., -1:] - total).exp().to(x.dtype)
    added = (scaled * to_end[..., None]).transpose(-1, -2) @ B[:, :, :, None]
    chunk_decay = total[..., -1].exp()
    h = ssm_state.float().unflatten(1, (groups, -1))
    chunk_states = []
    # unbind, not [:, index]: the gradient of an index is a whole tensor of zeros
    for decay, update in zip(
        chunk_decay[..., None, None].unbind(1), added.float().unbind(1), strict=True
    ):
        chunk_states.append(h)
        h = decay * h + update
    entering = torch.stack(chunk_states, 1).to(x.dtype)
    y = y + (C[:, :, :, None] @ entering.transpose(-1, -2)) * total.exp().to(x.dtype)[..., None]

    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, steps + pad, heads, -1)[:, :steps]
    return y + skip, h.flatten(1, 2)


def _blocks(x: Tensor) -> list[slice]:
    """Return slices of the first axis to process together: all on a GPU, single rows on a CPU."""
    block = x.shape[0] if x.is_cuda else 1
    return [slice(start, start + block) for start in range(0, x.shape[0], block)]


def _result_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.result_type(x, weight)


def _rms_scale(h: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(h²) + eps) over the last axis, with that axis kept."""
    squares = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_()
    return squares.div_(h.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(d: Tensor, normed: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of h·scale(h): scale · (d - normed · mean(d · normed)). Overwrites d."""
    along = (d * normed).mean(-1, keepdim=True)
    return d.addcmul_(normed, along, value=-1).mul_(scale)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x, dtype=dtype)
        for rows in _blocks(x):
            h = x[rows].float()
            y[rows] = (h * _rms_scale(h, eps)).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dx, d_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for rows in _blocks(x):
            h, d = x[rows].float(), grads[0][rows].float()
            scale = _rms_scale(h, ctx.eps)
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
        for rows in _blocks(y):
            h = F.silu(z[rows].float()).mul_(y[rows]).unflatten(-1, (groups, -1))
            out[rows] = h.mul_(_rms_scale(h, eps)).flatten(-2).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        y, z, weight = ctx.saved_tensors
        dy, dz = torch.empty_like(y), torch.empty_like(z)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _blocks(y):
            gate, y32, d = z[rows].float(), y[rows].float(), grads[0][rows].float()
            silu = F.silu(gate)
            h = (silu * y32).unflatten(-1, (ctx.groups, -1))
            scale = _rms_scale(h, ctx.eps)
            normed = h.mul_(scale)
            d_weight += (d * normed.flatten(-2)).flatten(0, -2).sum(0)
            split = (d * weight).unflatten(-1, (ctx.groups, -1))
            d_h = _norm_backward(split, normed, scale).flatten(-2)
            dy[rows] = silu.mul_(d_h)
            dz[rows] = torch.ops.aten.silu_backward(d_h.mul_(y32), gate)
        return dy, dz, d_weight.to(weight.dtype), None, None, None


def rms_norm_training(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`edge.plugins.norm.reference.rms_norm` with its own backward pass; x has two axes or more."""
    y: Tensor = _RmsNorm.apply(x, weight, eps, _result_dtype(x, weight))
    return y


def gated_rms_norm_training(
    y: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int
) -> Tensor:
    """`edge.plugins.gated_norm.reference.gated_rms_norm` with its own backward pass.

    y and z have two axes or more.
    """
    out: Tensor = _GatedRmsNorm.apply(y, z, weight, eps, groups, _result_dtype(y, weight))
    return out


class _CausalConv1d(torch.autograd.Function):
    """Processes a few rows at a time so that fp32 intermediates stay in the cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, state, weight, bias)
        y = torch.empty_like(x)
        for rows in _blocks(x):
            y[rows] = F.silu(_convolve(_padded(x[rows], state[rows]), weight, bias))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, state, weight, bias = ctx.saved_tensors
        width, steps = weight.shape[1], x.shape[1]
        taps = weight.float().T.contiguous()
        dx, d_state = torch.empty_like(x), torch.empty_like(state)
        d_taps, d_bias = torch.zeros_like(taps), torch.zeros_like(taps[0])
        for rows in _blocks(x):
            padded = _padded(x[rows], state[rows])
            y = _convolve(padded, weight, bias)
            d_y = torch.ops.aten.silu_backward(grads[0][rows].float(), y)
            d_padded = torch.zeros_like(padded)
            for k in range(width):
                d_padded[:, k : k + steps].addcmul_(d_y, taps[k])
                d_taps[k] += (padded[:, k : k + steps] * d_y).sum((0, 1))
            dx[rows], d_state[rows] = d_padded[:, width - 1 :], d_padded[:, : width - 1]
            d_bias += d_y.sum((0, 1))
        return dx, d_state, d_taps.T.to(weight.dtype), d_bias.to(bias.dtype)


def _padded(x: Tensor, state: Tensor) -> Tensor:
    return torch.cat([state.float(), x.float()], dim=1)


def _convolve(padded: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    taps = weight.float().T.contiguous()
    steps = padded.shape[1] - weight.shape[1] + 1
    y = torch.addcmul(bias.float(), padded[:, :steps], taps[0])
    for k in range(1, weight.shape[1]):
        y.addcmul_(padded[:, k : k + steps], taps[k])
    return y


def causal_conv1d_training(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`edge.plugins.causal_conv1d.reference.causal_conv1d` with sums in fp32. Same shapes."""
    state = conv_state.to(x.dtype)
    b = weight.new_zeros(weight.shape[0]) if bias is None else bias
    y: Tensor = _CausalConv1d.apply(x, state, weight, b)
    return y, torch.cat([state, x], dim=1)[:, x.shape[1] :]


SCAN_ELEMENTS = 1 << 19  # of one fp32 tensor of a chunk: a few of them fit in a core's L2 cache
SHORTEST_CHUNK = 8  # tokens: of large batches, too, few states are kept


class _SelectiveScan(torch.autograd.Function):
    """h = exp(Δ·A)·h + Δ·x·B; y = C·h. Keeps one state a chunk and computes the others again.

    Within a chunk only the recurrence itself goes token by token. All tensors are fp32, and time is
    the first axis: delta, x [T, B, E]; A [N, E]; B [T, B, G, N]; C [T, B, H, N]; h [B, N, E].
    """

    @staticmethod
    def forward(
        ctx: Any, keeps: bool, delta: Tensor, x: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`keeps`: whether a backward pass may follow."""
        y, starts = torch.empty_like(x), list[Tensor]()
        for tokens in _chunks(x, A):
            if keeps:
                starts.append(h)
            _, states = _states(delta[tokens], x[tokens], A, B[tokens], h)
            y[tokens] = _sum_over_states(states, C[tokens])
            h = states[-1].clone()
        ctx.save_for_backward(delta, x, A, B, C, *starts)
        return y, h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        delta, x, A, B, C, *starts = ctx.saved_tensors
        dy, d_h = grads
        d_delta, dx, dA = torch.empty_like(delta), torch.empty_like(x), torch.zeros_like(A)
        dB, dC = torch.empty_like(B), torch.empty_like(C)
        for tokens, start in zip(reversed(_chunks(x, A)), reversed(starts), strict=True):
            decay, states = _states(delta[tokens], x[tokens], A, B[tokens], start)
            dC[tokens] = _sum_over_channels(states, dy[tokens], C.shape[2])
            d_states = _spread(dy[tokens], C[tokens])
            d_states[-1] += d_h
            for t in range(len(decay) - 1, 0, -1):
                d_states[t - 1].addcmul_(decay[t], d_states[t])
            d_h = decay[0] * d_states[0]
            dB[tokens] = _sum_over_channels(d_states, delta[tokens] * x[tokens], B.shape[2])
            d_fed = _sum_over_states(d_states, B[tokens])
            dx[tokens] = d_fed * delta[tokens]
            # the gradient of Δ·A: states[t - 1] entered token t
            d_rate = d_states.mul_(decay)
            d_rate[0] *= start
            d_rate[1:] *= states[:-1]
            dA += torch.linalg.vecdot(d_rate, delta[tokens, :, None], dim=0).sum(0)
            d_delta[tokens] = d_fed.mul_(x[tokens]).add_(d_rate.mul_(A).sum(2))
        return None, d_delta, dx, dA, dB, dC, d_h


def _chunks(x: Tensor, A: Tensor) -> list[slice]:
    size = max(SHORTEST_CHUNK, SCAN_ELEMENTS // (x.shape[1] * A.numel()))
    return [slice(start, start + size) for start in range(0, x.shape[0], size)]


def _states(delta: Tensor, x: Tensor, A: Tensor, B: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays and the states of a chunk's tokens, each [T, B, N, E]."""
    decay, states = (delta[:, :, None] * A).exp_(), _spread(delta * x, B)
    states[0].addcmul_(decay[0], start)
    for t in range(1, len(states)):
        states[t].addcmul_(decay[t], states[t - 1])
    return decay, states


def _spread(values: Tensor, rows: Tensor) -> Tensor:
    """Multiply channels [T, B, E] and states [T, B, G, N] of their groups: [T, B, N, E]."""
    grouped = values.unflatten(-1, (rows.shape[2], -1))[:, :, None]
    return (grouped * rows.transpose(2, 3)[..., None]).flatten(-2)


def _sum_over_states(states: Tensor, rows: Tensor) -> Tensor:
    """Return the products with [T, B, G, N], summed over the states: [T, B, E]."""
    grouped = states.unflatten(-1, (rows.shape[2], -1)).transpose(2, 3)
    return (rows[..., None, :] @ grouped).flatten(2)


def _sum_over_channels(states: Tensor, values: Tensor, groups: int) -> Tensor:
    """Return the products with [T, B, E], summed over the channels of groups: [T, B, G, N]."""
    grouped = states.unflatten(-1, (groups, -1)).transpose(2, 3)
    return (grouped @ values.unflatten(-1, (groups, -1))[..., None]).squeeze(-1)


def selective_scan_training(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    z: Tensor,
    ssm_state: Tensor,
) -> tuple[Tensor, Tensor]:
    """`edge.plugins.selective_scan.reference.selective_scan` with its own backward pass.

    Shapes as there.
    """
    delta = F.softplus(dt.float() + dt_bias.float())
    A = -torch.exp(A_log.float()).T.contiguous()
    by_time = [v.float().transpose(0, 1).contiguous() for v in (delta, x)]
    rows = [v.float().transpose(0, 1).unflatten(-1, (-1, A.shape[0])) for v in (B, C)]
    with torch.autocast(x.device.type, enabled=False):
        keeps = torch.is_grad_enabled()  # never within a Function
        y, h = _SelectiveScan.apply(keeps, *by_time, A, *rows, ssm_state.float())
    y = y.transpose(0, 1) + D.float() * x.float()
    return (y * F.silu(z.float())).to(x.dtype), h
