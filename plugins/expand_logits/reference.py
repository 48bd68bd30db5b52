"""Expand logits in PyTorch."""

from __future__ import annotations

from torch import Tensor


def expand_logits(x: Tensor, index: Tensor) -> Tensor:
    """Put logits x [..., K] in their places [..., V]: id v has column index[v], or the smallest of
    x where that is -1.

    The other ids thus have a finite logarithm of a probability that is next to nothing.
    """
    listed = x.index_select(-1, index.clamp_min(0).long())
    return listed.where(index >= 0, x.amin(-1, keepdim=True))
