"""GPTQ: round a weight to 4 bits so that the product's output, not the weight, stays close."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.quantize.weights import Scales, inverse, quantize_blocks, quantize_minimum

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

# Number of columns updated one by one before the rest of the matrix is (Algorithm 1's B).
_LAZY_COLUMNS = 128
# Maximum number of attempts; each damps a singular Hessian ten times more than the last.
_ATTEMPTS = 6
# Damping added to the diagonal, as a share of the diagonal's mean.
_DAMP = 0.01


def quantize_gptq(
    weight: F32, hessian: F64, block: int, minimum: bool = False
) -> tuple[U8, Scales] | tuple[U8, Scales, Scales]:
    """Quantize weight [N, K] to packed [N, K/block, block/2] and scales [N, K/block], in the layout
    of `quantize_blocks`; with `minimum`, in that of `quantize_minimum`, active columns counting
    more.

    GPTQ (arXiv 2210.17323, Algorithm 1) rounds columns in turn. The remaining columns compensate
    the error of each, weighted by the inverse Hessian. Scales are found before any column is
    rounded ("static groups"), so columns can be rounded in any order: the most active inputs first,
    while most columns can still compensate. An input that was never active does not affect the
    others and is rounded to nearest.

    hessian: XᵀX [K, K] of the calibrated inputs. Multiplying it by a factor, such as the number of
    rows, does not change the result.

    Raises ExportError for a Hessian of the wrong shape or with values that are not finite, and for
    a weight that `quantize_blocks` refuses.
    """
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ExportError(f"a Hessian {list(hessian.shape)} does not fit {columns} inputs")
    if not np.isfinite(hessian).all():
        raise ExportError(
            "the calibrated XᵀX is NaN or infinite", remedy="look for the layer that overflows"
        )
    if minimum:
        active = np.diag(hessian) / max(np.diag(hessian).mean(), np.finfo(np.float64).tiny)
        _, scales, minimums = quantize_minimum(weight, block, (active + _DAMP).astype(np.float32))
    else:
        _, scales = quantize_blocks(weight, 4, block)
        minimums = -8 * scales
    order = np.argsort(-np.diag(hessian), kind="stable")
    propagate = _inverse_factor(hessian[np.ix_(order, order)])
    quants = np.empty(weight.shape, np.uint8)
    column_scales, column_minimums = (
        np.repeat(values.astype(np.float32), block, 1)[:, order] for values in (scales, minimums)
    )
    quants[:, order] = _round(
        weight[:, order].astype(np.float64), column_scales, column_minimums, propagate
    )
    blocks = quants.reshape(len(weight), -1, block)
    packed = blocks[..., 0::2] | (blocks[..., 1::2] << np.uint8(4))
    return (packed, scales, minimums) if minimum else (packed, scales)


def _round(weight: F64, scales: F32, minimums: F32, propagate: F64) -> U8:
    """Return the quants, from 0, of columns rounded in the given order. Overwrites `weight`."""
    columns = weight.shape[1]
    inverses = inverse(scales).astype(np.float64)
    quants = np.empty(weight.shape, np.uint8)
    for start in range(0, columns, _LAZY_COLUMNS):
        stop = min(start + _LAZY_COLUMNS, columns)
        errors = np.empty((len(weight), stop - start))
        for j in range(start, stop):
            rounded = np.clip(np.rint((weight[:, j] - minimums[:, j]) * inverses[:, j]), 0, 15)
            quants[:, j] = rounded.astype(np.uint8)
            error = (weight[:, j] - (rounded * scales[:, j] + minimums[:, j])) / propagate[j, j]
            weight[:, j + 1 : stop] -= np.outer(error, propagate[j, j + 1 : stop])
            errors[:, j - start] = error
        weight[:, stop:] -= errors @ propagate[start:stop, stop:]
    return quants


def _inverse_factor(hessian: F64) -> F64:
    """Return the upper triangular U with UᵀU = H⁻¹ for the damped Hessian H."""
    damped = hessian.astype(np.float64)
    diagonal = np.diag(damped).copy()
    dead = diagonal <= 0
    diagonal[dead] = diagonal[~dead].mean() if (~dead).any() else 1.0
    # inputs that were never active have zeros off the diagonal too, up to rounding
    damped[dead, :] = damped[:, dead] = 0.0
    for attempt in range(_ATTEMPTS):
        np.fill_diagonal(damped, diagonal + _DAMP * 10**attempt * diagonal.mean())
        try:
            # factor the flipped matrix, so that H = V·Vᵀ with V upper triangular; U is V's inverse
            upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        return np.linalg.inv(upper)
    raise ExportError(
        "the calibrated XᵀX cannot be inverted, however much it is damped",
        remedy="calibrate with more text",
    )
