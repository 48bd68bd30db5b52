"""Hadamard matrices, the rotations built from them, and the fast transform of whole weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edge.plugins.hadamard.matrices import factors, matrix, rotate, rotation_blocks
from edge.plugins.hadamard.reference import hadamard

# d_inner of Mamba-130M to 2.8B and of MambaByte, head widths, and the smallest of every kind
WHOLE = (1, 2, 4, 12, 20, 24, 28, 40, 48, 56, 80, 128, 768, 1536, 1792, 2048)
LARGE = (3072, 3584, 4096, 5120)
# n → blocks: no Hadamard matrix of that order is constructed
IN_BLOCKS = {3: 3, 6: 3, 10: 5, 14: 7, 36: 9, 44: 11, 96 * 3: 9, 2304: 9, 600: 75}


def dense(n: int) -> NDArray[np.float64]:
    """Return R as in the statement of the op: slow ⊗ fastᵀ."""
    slow, fast = (part.astype(np.float64) for part in factors(n))
    return np.kron(slow, fast.T)


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("order", [1, 2, 4, 64, 12, 20, 28, 40, 24, 56, 160])
def test_a_hadamard_matrix_is_one(order: int) -> None:
    h = matrix(order)
    assert h.shape == (order, order) and set(np.unique(h)) <= {-1, 1}
    assert np.array_equal(h.astype(int) @ h.T, order * np.eye(order))


def test_some_are_not_their_own_transpose() -> None:
    symmetric = {m: np.array_equal(matrix(m), matrix(m).T) for m in (12, 20, 28, 40)}
    assert symmetric == {12: True, 20: False, 28: True, 40: False}


@pytest.mark.parametrize("order", [-4, 0, 3, 6, 36, 44])
def test_orders_that_are_not_built_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match="no Hadamard matrix of order"):
        matrix(order)


@pytest.mark.parametrize("n", [*WHOLE, *LARGE, *IN_BLOCKS])
def test_factors_are_orthonormal(n: int) -> None:
    slow, fast = factors(n)
    assert slow.dtype == fast.dtype == np.float32 and len(slow) * len(fast) == n
    for part in (slow, fast):
        assert np.abs(part.astype(np.float64) @ part.T - np.eye(len(part))).max() < 3e-7
        with pytest.raises(ValueError, match="read-only"):
            part[0, 0] = 0


@pytest.mark.parametrize("n", WHOLE)
def test_every_value_reaches_every_other(n: int) -> None:
    assert rotation_blocks(n) == 1
    np.testing.assert_allclose(np.abs(dense(n)), n**-0.5, rtol=1e-6)


@pytest.mark.parametrize(("n", "blocks"), IN_BLOCKS.items())
def test_other_widths_are_rotated_in_blocks(n: int, blocks: int) -> None:
    assert rotation_blocks(n) == blocks
    size = n // blocks
    expected = np.kron(np.eye(blocks), np.ones((size, size))) * size**-0.5
    np.testing.assert_allclose(np.abs(dense(n)), expected, rtol=1e-6)


@pytest.mark.parametrize("n", [*WHOLE, *LARGE, *IN_BLOCKS])
def test_the_fast_transform_is_the_matrix(n: int) -> None:
    x = normal(3, 2, n)
    kept = x.copy()
    slow, fast = factors(n)
    grid = x.astype(np.float64).reshape(3, 2, len(slow), len(fast))
    expected = np.einsum("ip,abpq,qj->abij", slow, grid, fast, optimize=True).reshape(x.shape)
    if n <= 2048:
        np.testing.assert_allclose(expected, x @ dense(n).T, atol=1e-12)
    found = {
        "fast": rotate(x),
        "numpy": hadamard(x, slow, fast),
        "torch": hadamard(*map(torch.tensor, (x, slow, fast))).numpy(),
    }
    for name, y in found.items():
        assert y.dtype == np.float32 and y.shape == x.shape
        np.testing.assert_allclose(y, expected, atol=5e-6, err_msg=name)
    assert np.array_equal(x, kept)


@pytest.mark.parametrize("n", [20, 48, 80, 600])
def test_a_rotated_weight_undoes_the_rotation(n: int) -> None:
    """W' · (R · x) = W · x with W' = rotate(W); 20 and 80 need the transpose, not R again."""
    w, x = normal(7, n), normal(n)
    turned = rotate(w) @ rotate(x)
    np.testing.assert_allclose(turned, w @ x, atol=1e-4)
    slow, fast = factors(n)
    back = hadamard(rotate(x), slow.T, fast.T)
    np.testing.assert_allclose(back, x, atol=1e-5)
    if n in (20, 80):
        assert np.abs(rotate(rotate(x)) - x).max() > 0.1


def test_an_outlier_is_spread_over_all_values() -> None:
    x = normal(1536)
    x[700] = 1000
    assert np.abs(rotate(x)).max() < 1000 / 1536**0.5 + 6


def test_double_precision_stays() -> None:
    x = np.random.default_rng(3).standard_normal((2, 1536))
    y = rotate(x)
    assert y.dtype == np.float64
    np.testing.assert_allclose(np.square(y).sum(-1), np.square(x).sum(-1), rtol=1e-12)


@pytest.mark.parametrize("n", [0, -12])
def test_nothing_to_rotate_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="cannot be rotated"):
        factors(n)
    with pytest.raises(ValueError, match="cannot be rotated"):
        rotation_blocks(n)
