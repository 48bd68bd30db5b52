"""Orthonormal Hadamard rotations: their matrices, and the fast transform of whole weights.

A rotation of n = p·q values is R = slow ⊗ fastᵀ: reshape to [p, q], multiply by `slow` from the
left and by `fast` from the right. With W' = W·Rᵀ, W'·(R·x) = W·x. Not every R is symmetric, so the
inverse is always the transpose, never R itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Orders that are not powers of two, 4 times the odd part of n; 40 is twice 20.
_ORDERS = (12, 20, 28)
# Maximum rows of `fast`. In ONNX Runtime no split was faster for n from 768 to 5120 (128 tokens of
# 1536: 0.38 ms, against 0.56 with 128 rows and 1.5 with 8).
_FAST_ROWS = 64
_TWO = np.array([[1, 1], [1, -1]], np.int8)


def matrix(order: int) -> NDArray[np.int8]:
    """Return a Hadamard matrix, ±1 with H·Hᵀ = order·I, of order m·2^k, m in {1, 12, 20, 28}.

    12 and 28 are Paley's second construction, over 5 and 13, and symmetric. 20 is his first, over
    19; it and its double, 40, are not symmetric. (R. E. A. C. Paley, On orthogonal matrices, J.
    Math. Phys. 12, 1933; doubling is Sylvester's.) Raises ValueError for other orders.
    """
    if order == 1:
        return np.ones((1, 1), np.int8)
    if order in (12, 28):
        return _paley_2(order // 2 - 1)
    if order == 20:
        return _paley_1(19)
    if order < 1 or order % 2:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    return np.kron(_TWO, matrix(order // 2))


def rotation_blocks(n: int) -> int:
    """Return the number of blocks that are rotated separately: 1 when R mixes all n values.

    n = m·2^k with m in {1, 12, 20, 28} (and so 40) has one block. Any other n is rotated in blocks
    of its largest power of two; an odd n has n blocks of one value, so it is not rotated at all.
    Raises ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"{n} values cannot be rotated")
    odd = n // _power_of_two(n)
    return 1 if odd == 1 or (4 * odd in _ORDERS and n % 4 == 0) else odd


@cache
def factors(n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (slow [p, p], fast [q, q]) of the rotation of n values: fp32, orthonormal, read-only.

    fast = H_2^b, b up to 6; slow = H_m ⊗ H_2^a, or I ⊗ H_2^a where `rotation_blocks` is not 1.
    """
    blocks, order, power = _parts(n)
    fast = min(power, _FAST_ROWS)
    slow = np.kron(_unit(matrix(order)), _unit(matrix(power // fast)))
    slow = np.kron(np.eye(blocks), slow)
    pair = slow.astype(np.float32), _unit(matrix(fast)).astype(np.float32)
    for part in pair:
        part.flags.writeable = False
    return pair


def rotate(x: Array) -> Array:
    """Return R·x over the last axis by the fast Walsh-Hadamard transform: n·log n, for weights.

    x floating [..., n]; W' = rotate(W) is W·Rᵀ. Equals `reference.hadamard(x, *factors(n))`.
    """
    n = x.shape[-1]
    blocks, order, power = _parts(n)
    grid = x.reshape(-1, blocks, order, power)
    stride = 1
    while stride < power:
        pairs = grid.reshape(*grid.shape[:3], -1, 2, stride)
        left, right = pairs[..., 0, :], pairs[..., 1, :]
        grid = np.stack([left + right, left - right], -2).reshape(grid.shape)
        stride *= 2
    if order > 1:
        grid = matrix(order).astype(x.dtype) @ grid
    return (grid / np.sqrt(order * power).astype(x.dtype)).reshape(x.shape)


def _parts(n: int) -> tuple[int, int, int]:
    """Return (blocks, order of H_m, power of two), whose product is n."""
    blocks, power = rotation_blocks(n), _power_of_two(n)
    order = n // power if blocks == 1 else 1
    return (1, 4 * order, power // 4) if order > 1 else (blocks, 1, power)


def _power_of_two(n: int) -> int:
    """Return the largest power of two that divides n."""
    return n & -n


def _unit(signs: NDArray[np.int8]) -> NDArray[np.float64]:
    return signs / np.sqrt(len(signs))


def _jacobsthal(q: int) -> NDArray[np.int8]:
    """Return Q, where Q[a, b] is 1 if a - b is a square modulo the prime q, 0 if a = b, else -1."""
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, q)], np.int8)
    return character[np.subtract.outer(np.arange(q), np.arange(q)) % q]


def _paley_1(q: int) -> NDArray[np.int8]:
    """Return order q + 1 for a prime q = 3 modulo 4: I + S, S = [[0, 1], [-1, Q]] skew."""
    skew = np.zeros((q + 1, q + 1), np.int8)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _jacobsthal(q)
    return skew + np.eye(q + 1, dtype=np.int8)


def _paley_2(q: int) -> NDArray[np.int8]:
    """Return order 2(q + 1) for a prime q = 1 modulo 4.

    It is C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]], where C = [[0, 1], [1, Q]] is a symmetric
    conference matrix.
    """
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(q)
    diagonal = np.kron(np.eye(q + 1, dtype=np.int8), np.array([[1, -1], [-1, -1]], np.int8))
    return np.kron(conference, _TWO) + diagonal
