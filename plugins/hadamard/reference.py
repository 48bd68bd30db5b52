"""Rotations over the last axis, of numpy arrays or tensors."""

from __future__ import annotations

from typing import Any, TypeVar

from numpy.typing import NDArray
from torch import Tensor

from edge.plugins.quantize.reference import quantize

AnyArray = TypeVar("AnyArray", "NDArray[Any]", "Tensor")


def hadamard(x: AnyArray, slow: AnyArray, fast: AnyArray) -> AnyArray:
    """Return R·x over the last axis. x [..., n], slow [p, p], fast [q, q], n = p·q."""
    grid = x.reshape(*x.shape[:-1], slow.shape[0], fast.shape[0])
    return (slow @ grid @ fast).reshape(x.shape)


def hadamard_quantize(x: Tensor, slow: Tensor, fast: Tensor, scale: Tensor) -> Tensor:
    """Return R·x quantized by scale [1|n] → i8 [..., n]."""
    return quantize(hadamard(x, slow, fast), scale)
