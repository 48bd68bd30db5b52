"""The product of two values, number by number."""

from __future__ import annotations

from torch import Tensor


def multiply(x: Tensor, z: Tensor) -> Tensor:
    """x · z."""
    return x * z
