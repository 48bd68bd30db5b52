"""Reference of the elementwise product."""

from __future__ import annotations

from torch import Tensor


def multiply(x: Tensor, z: Tensor) -> Tensor:
    """Return x · z."""
    return x * z
