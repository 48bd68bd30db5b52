"""Orthonormal Hadamard rotations: which matrices, and the fast transform of whole weights.

A rotation of n = p·q values is R = slow ⊗ fastᵀ: reshape to [p, q], multiply by `slow` from the
left and by `fast` from the right. With W' = W·Rᵀ, W'·(R·x) = W·x. Not every R is symmetric: its
inverse is its transpose, never taken to be itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Orders that are not a power of two, 4 times the odd part of n; 40 is twice 20.
_ORDERS = (12, 20, 28)
# fast has at most 64 rows: of all splits that, or one as good, was the fastest in ONNX Runtime for
# n from 768 to 5120 (128 tokens of 1536: 0.38 ms, against 0.56 with 128 rows and 1.5 with 8).
_FAST_ROWS = 64
_TWO = np.array([[1, 1], [1, -1]], np.int8)


def matrix(order: int) -> NDArray[np.int8]:
    """A Hadamard matrix H of entries ±1 with H·Hᵀ = order·I, for order m·2^k, m in {1, 12, 20, 28}.

    12 and 28 are Paley's second construction, over 5 and 13, and symmetric; 20 is his first, over
    19, and like its double, 40, is not. (R. E. A. C. Paley, On orthogonal matrices, J. Math. Phys.
    12, 1933; doubling is Sylvester's.) Raises ValueError for other orders.
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
    """How many blocks of n/blocks values are rotated on their own: 1 when R mixes all of them.

    n = m·2^k with m in {1, 12, 20, 28} (and so 40) has one block. Any other n is rotated in blocks
    of its largest power of two; an odd n has n blocks of one value: no rotation at all. Raises
    ValueError for n < 1.
    """
    if n < 1:
        raise ValueError(f"{n} values cannot be rotated")
    odd = n // _power_of_two(n)
    return 1 if odd == 1 or (4 * odd in _ORDERS and n % 4 == 0) else odd


@cache
def factors(n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(slow [p, p], fast [q, q]) of the rotation of n values, fp32, orthonormal, not to be written.

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
    """R·x over the last axis by the fast Walsh-Hadamard transform: n·log n, for whole weights.

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
    """(blocks, order of H_m, power of two), whose product is n."""
    blocks, power = rotation_blocks(n), _power_of_two(n)
    order = n // power if blocks == 1 else 1
    return (1, 4 * order, power // 4) if order > 1 else (blocks, 1, power)


def _power_of_two(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def _unit(signs: NDArray[np.int8]) -> NDArray[np.float64]:
    return signs / np.sqrt(len(signs))


def _jacobsthal(q: int) -> NDArray[np.int8]:
    """Q[a, b] is 1 where a - b is a square modulo the prime q, -1 where it is none, 0 if a = b."""
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, q)], np.int8)
    return character[np.subtract.outer(np.arange(q), np.arange(q)) % q]


def _paley_1(q: int) -> NDArray[np.int8]:
    """Order q + 1 for a prime q = 3 modulo 4: I + S, S = [[0, 1], [-1, Q]] skew."""
    skew = np.zeros((q + 1, q + 1), np.int8)
    skew[0, 1:], skew[1:, 0], skew[1:, 1:] = 1, -1, _jacobsthal(q)
    return skew + np.eye(q + 1, dtype=np.int8)


def _paley_2(q: int) -> NDArray[np.int8]:
    """Order 2(q + 1) for a prime q = 1 modulo 4: C ⊗ [[1, 1], [1, -1]] + I ⊗ [[1, -1], [-1, -1]].

    C = [[0, 1], [1, Q]] is a symmetric conference matrix.
    """
    conference = np.zeros((q + 1, q + 1), np.int8)
    conference[0, 1:], conference[1:, 0], conference[1:, 1:] = 1, 1, _jacobsthal(q)
    diagonal = np.kron(np.eye(q + 1, dtype=np.int8), np.array([[1, -1], [-1, -1]], np.int8))
    return np.kron(conference, _TWO) + diagonal
