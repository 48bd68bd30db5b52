"""The selective scans in parallel form, for training and long prefills in PyTorch.

Same maths and signatures as `edge.plugins.reference`, which is the truth they are tested against.
"""

from __future__ import annotations

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
    whole = total[..., -1].exp()
    h = ssm_state.float().unflatten(1, (groups, -1))
    before = []
    # unbind, not [:, index]: the gradient of an index is a whole tensor of zeros
    for decay, more in zip(whole[..., None, None].unbind(1), added.float().unbind(1), strict=True):
        before.append(h)
        h = decay * h + more
    entering = torch.stack(before, 1).to(x.dtype)
    y = y + (C[:, :, :, None] @ entering.transpose(-1, -2)) * total.exp().to(x.dtype)[..., None]

    y = y.permute(0, 1, 4, 2, 3, 5).reshape(batch, steps + pad, heads, -1)[:, :steps]
    return y + skip, h.flatten(1, 2)
