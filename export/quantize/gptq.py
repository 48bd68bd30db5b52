"""GPTQ: rounding a weight to 4 bits so that the product's output, not the weight, stays close."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.quantize.weights import Scales, inverse, quantize_blocks, quantize_minimum

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

# Columns updated one by one before the rest of the matrix is (Algorithm 1's B).
_LAZY = 128
# A Hessian that is singular even when damped is damped ten times more, this often at most.
_ATTEMPTS = 6
# Added to the diagonal, as a share of its mean.
_DAMP = 0.01


def quantize_gptq(
    weight: F32, hessian: F64, block: int, minimum: bool = False
) -> tuple[U8, Scales] | tuple[U8, Scales, Scales]:
    """weight [N, K] → packed [N, K/block, block/2] and scales [N, K/block], as `quantize_blocks`;
    with `minimum` also the minimums, as `quantize_minimum`, to which active columns count more.

    GPTQ (arXiv 2210.17323, Algorithm 1): columns are rounded in turn, and the error of each is
    made up for by those still to come, weighted by the inverse Hessian. Scales are found before
    any column is rounded ("static groups"), so that the order of columns is free: the most active
    inputs come first, while most columns can still make up for them. An input that was never active
    has no say in the others and is rounded to nearest.

    hessian: XᵀX [K, K] of the calibrated inputs; any factor, such as the number of rows, leaves the
    result as it is.

    Raises ExportError for a Hessian of another shape, or with values that are not finite, and for
    a weight that `quantize_blocks` refuses.
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ExportError(f"a Hessian {list(hessian.shape)} is not of {columns} inputs")
    if not np.isfinite(hessian).all():
        raise ExportError(
            "the calibrated XᵀX is NaN or infinite", remedy="look for the layer that overflows"
        )
    if minimum:
        active = np.diag(hessian) / max(np.diag(hessian).mean(), np.finfo(np.float64).tiny)
        _, scales, least = quantize_minimum(weight, block, (active + _DAMP).astype(np.float32))
    else:
        _, scales = quantize_blocks(weight, 4, block)
        least = -8 * scales
    order = np.argsort(-np.diag(hessian), kind="stable")
    propagate = _inverse_factor(hessian[np.ix_(order, order)])
    quants = np.empty(weight.shape, np.uint8)
    units, lows = (
        np.repeat(each.astype(np.float32), block, 1)[:, order] for each in (scales, least)
    )
    quants[:, order] = _round(weight[:, order].astype(np.float64), units, lows, propagate)
    blocks = quants.reshape(len(weight), -1, block)
    packed = blocks[..., 0::2] | (blocks[..., 1::2] << np.uint8(4))
    return (packed, scales, least) if minimum else (packed, scales)


def _round(weight: F64, scales: F32, lows: F32, propagate: F64) -> U8:
    """Columns in the order given → their quants from 0. `weight` is used up."""
    columns = weight.shape[1]
    inverses = inverse(scales).astype(np.float64)
    quants = np.empty(weight.shape, np.uint8)
    for start in range(0, columns, _LAZY):
        stop = min(start + _LAZY, columns)
        errors = np.empty((len(weight), stop - start))
        for j in range(start, stop):
            rounded = np.clip(np.rint((weight[:, j] - lows[:, j]) * inverses[:, j]), 0, 15)
            quants[:, j] = rounded.astype(np.uint8)
            error = (weight[:, j] - (rounded * scales[:, j] + lows[:, j])) / propagate[j, j]
            weight[:, j + 1 : stop] -= np.outer(error, propagate[j, j + 1 : stop])
            errors[:, j - start] = error
        weight[:, stop:] -= errors @ propagate[start:stop, stop:]
    return quants


def _inverse_factor(hessian: F64) -> F64:
    """Upper triangular U with UᵀU = H⁻¹, of the damped Hessian."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped).copy()
    dead = diagonal <= 0
    diagonal[dead] = diagonal[~dead].mean() if (~dead).any() else 1.0
    # what never was active has, rounding apart, zeros beside its diagonal too
    damped[dead, :] = damped[:, dead] = 0.0
    for attempt in range(_ATTEMPTS):
        np.fill_diagonal(damped, diagonal + _DAMP * 10**attempt * diagonal.mean())
        try:
            # of the matrix turned about, so that H = V·Vᵀ with V upper triangular; U is its inverse
            upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        return np.linalg.inv(upper)
    raise ExportError(
        "the calibrated XᵀX cannot be inverted, however much it is damped",
        remedy="calibrate with more text",
    )
