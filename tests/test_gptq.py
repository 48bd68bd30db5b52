"""GPTQ against rounding to nearest, on inputs correlated like a model's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.quantize.gptq import quantize_gptq
from edge.export.quantize.weights import (
    Scales,
    dequantize_blocks,
    quantize_blocks,
    quantize_minimum,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def _weight(rows: int, columns: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).normal(0, 0.1, (rows, columns)).astype(np.float32)


def _inputs(rows: int, columns: int, rank: int, seed: int = 1) -> F64:
    """A few directions carry most of the energy, and channels differ in size."""
    random = np.random.default_rng(seed)
    directions, sizes = random.normal(size=(rank, columns)), random.normal(0, 0.7, columns)
    mixed = random.normal(size=(rows, rank)) @ directions
    noisy: F64 = mixed + 0.3 * random.normal(size=(rows, columns))
    return noisy * np.exp(sizes)


def _error(
    weight: F32, packed: NDArray[np.uint8], scales: Scales, x: F64, minimums: Scales | None = None
) -> float:
    wide = dequantize_blocks(packed, scales, 4, minimums)
    difference = x @ (weight - wide).T.astype(np.float64)
    return float(np.square(difference).sum() / np.square(x @ weight.T.astype(np.float64)).sum())


@pytest.mark.parametrize(("columns", "block"), [(256, 128), (384, 128), (96, 32)])
def test_output_error_is_well_below_rounding_to_nearest(columns: int, block: int) -> None:
    weight, x = _weight(70, columns), _inputs(2000, columns, columns // 8)
    nearest = _error(weight, *quantize_blocks(weight, 4, block), x)
    found = _error(weight, *quantize_gptq(weight, x.T @ x, block), x)
    assert found < 0.5 * nearest
    # and on inputs from the same source that calibration did not see
    unseen = _inputs(4000, columns, columns // 8)[2000:]
    nearest = _error(weight, *quantize_blocks(weight, 4, block), unseen)
    found = _error(weight, *quantize_gptq(weight, x.T @ x, block), unseen)
    assert found < 0.5 * nearest


def test_with_minimums() -> None:
    """Less error than without; a weight that a file had in such blocks comes back exactly."""
    weight, x = _weight(70, 256) + np.float32(0.1), _inputs(2000, 256, 32)
    plain = _error(weight, *quantize_gptq(weight, x.T @ x, 32), x)
    packed, scales, minimums = quantize_gptq(weight, x.T @ x, 32, minimum=True)  # type: ignore[misc]
    assert _error(weight, packed, scales, x, minimums) < 0.8 * plain
    packed, scales, minimums = quantize_minimum(weight, 32)
    kept = dequantize_blocks(packed, scales, 4, minimums)
    again = quantize_gptq(kept, x.T @ x, 32, minimum=True)
    assert all(np.array_equal(a, b) for a, b in zip(again, (packed, scales, minimums), strict=True))


def test_a_weight_of_16_levels_a_block_comes_back_exactly() -> None:
    random = np.random.default_rng(2)
    quants = random.integers(-8, 8, (24, 4, 32)).astype(np.float32)
    quants[..., 5] = -8
    scales = random.uniform(-0.1, 0.1, (24, 4, 1)).astype(np.float32)
    weight = (quants * scales).reshape(24, 128)
    x = _inputs(500, 128, 16)
    packed, found = quantize_gptq(weight, x.T @ x, 32)
    np.testing.assert_allclose(dequantize_blocks(packed, found, 4), weight, rtol=1e-6, atol=0)


def test_independent_inputs_give_rounding_to_nearest() -> None:
    weight = _weight(33, 128)
    packed, scales = quantize_gptq(weight, np.diag(np.linspace(1, 9, 128)), 128)
    nearest, nearest_scales = quantize_blocks(weight, 4, 128)
    np.testing.assert_array_equal(packed, nearest)
    np.testing.assert_array_equal(scales, nearest_scales)


def test_the_number_of_rows_does_not_matter() -> None:
    weight, x = _weight(16, 128), _inputs(300, 128, 10)
    sums, mean = quantize_gptq(weight, x.T @ x, 64), quantize_gptq(weight, x.T @ x / 300, 64)
    assert (sums[0] != mean[0]).mean() < 1e-3
    np.testing.assert_array_equal(sums[1], mean[1])


def test_a_singular_hessian_is_damped() -> None:
    weight, x = _weight(20, 256), _inputs(2000, 256, 256)[:17]
    hessian = x.T @ x
    assert np.linalg.matrix_rank(hessian) == 17
    found = _error(weight, *quantize_gptq(weight, hessian, 128), x)
    assert found < 0.2 * _error(weight, *quantize_blocks(weight, 4, 128), x)


def test_a_hessian_that_rounding_made_indefinite_is_damped_more() -> None:
    weight, x = _weight(20, 64), _inputs(400, 64, 8)
    hessian = x.T @ x
    lowest = np.linalg.eigh(hessian)[1][:, 0]
    hessian -= 0.3 * np.diag(hessian).mean() * np.outer(lowest, lowest)
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(hessian + 0.01 * np.diag(hessian).mean() * np.eye(64))
    found = _error(weight, *quantize_gptq(weight, hessian, 64), x)
    assert found < _error(weight, *quantize_blocks(weight, 4, 64), x)


def test_a_hessian_that_no_damping_makes_definite_is_refused() -> None:
    hessian = np.full((64, 64), 1e6)
    np.fill_diagonal(hessian, 1.0)
    with pytest.raises(ExportError, match="cannot be inverted"):
        quantize_gptq(_weight(4, 64), hessian, 64)


def test_inputs_that_never_were_active_are_rounded_to_nearest() -> None:
    weight, x = _weight(20, 128), _inputs(400, 128, 12)
    dead = np.array([0, 7, 64, 127])
    x[:, dead] = 0
    packed, scales = quantize_gptq(weight, x.T @ x, 64)
    found, nearest = (
        dequantize_blocks(p, s, 4)[:, dead]
        for p, s in ((packed, scales), quantize_blocks(weight, 4, 64))
    )
    np.testing.assert_array_equal(found, nearest)
    assert _error(weight, packed, scales, x) < _error(weight, *quantize_blocks(weight, 4, 64), x)


def test_nothing_active_at_all_is_rounding_to_nearest() -> None:
    weight = _weight(5, 64)
    packed, _ = quantize_gptq(weight, np.zeros((64, 64)), 32)
    np.testing.assert_array_equal(packed, quantize_blocks(weight, 4, 32)[0])


def test_zero_rows_and_zero_blocks_stay_zero() -> None:
    weight, x = _weight(6, 128), _inputs(300, 128, 10)
    weight[2] = 0
    weight[4, 64:] = 0
    packed, scales = quantize_gptq(weight, x.T @ x, 64)
    found = dequantize_blocks(packed, scales, 4)
    assert not found[2].any()
    assert not found[4, 64:].any()


def test_a_hessian_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ExportError, match=r"\[64, 64\] does not fit 128 inputs"):
        quantize_gptq(_weight(4, 128), np.eye(64), 64)
    broken = np.eye(128)
    broken[3, 3] = np.nan
    with pytest.raises(ExportError, match="NaN or infinite"):
        quantize_gptq(_weight(4, 128), broken, 64)
    with pytest.raises(ExportError, match="do not divide"):
        quantize_gptq(_weight(4, 100), np.eye(100), 64)
