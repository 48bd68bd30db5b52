"""SmoothQuant's divisors: the equation, dead channels, and an unchanged product."""

from __future__ import annotations

import numpy as np
import pytest

from edge.errors import ExportError
from edge.export.quantize.scales import (
    smoothing,
)


def test_equation_4() -> None:
    x = np.array([4.0, 0.25, 9.0], np.float32)
    w = np.array([1.0, 4.0, 0.01], np.float32)
    np.testing.assert_allclose(smoothing(x, w), [2, 0.25, 30], rtol=1e-6)
    np.testing.assert_allclose(smoothing(x, w, 1.0), x, rtol=1e-6)
    np.testing.assert_allclose(smoothing(x, w, 0.0), 1 / w, rtol=1e-6)
    # alpha 0.5 makes both sides equally large, channel by channel
    s = smoothing(x, w)
    np.testing.assert_allclose(x / s, w * s, rtol=1e-6)


def test_channels_that_never_were_active_are_left_alone_and_extremes_bounded() -> None:
    x = np.array([0.0, 0.0, 1e12], np.float32)
    w = np.array([2.0, 0.0, 1e-12], np.float32)
    s = smoothing(x, w)
    np.testing.assert_array_equal(s[:2], [1, 1])
    assert s[2] == np.float32(1e5)
    assert smoothing(w[2:], np.array([1e12], np.float32))[0] == np.float32(1e-5)


def test_a_channel_that_nothing_reads_does_not_set_the_scale() -> None:
    x = np.array([40.0, 20.0, 3.0], np.float32)
    w = np.array([0.0, 0.1, 0.2], np.float32)
    s = smoothing(x, w)
    assert (x / s).argmax() == 1


def test_the_product_does_not_change() -> None:
    random = np.random.default_rng(0)
    hidden = random.normal(size=(50, 32)).astype(np.float32)
    norm = random.normal(1, 0.2, 32).astype(np.float32)
    weights = [random.normal(size=(n, 32)).astype(np.float32) for n in (8, 5)]
    s = smoothing(np.abs(hidden * norm).max(0), np.abs(np.concatenate(weights)).max(0))
    for weight in weights:
        before = (hidden * norm) @ weight.T
        after = (hidden * (norm / s)) @ (weight * s).T
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "w", "alpha", "message"),
    [
        ([1.0, 2.0], [1.0], 0.5, "do not match"),
        ([1.0], [1.0], 1.5, "not between 0 and 1"),
        ([np.nan], [1.0], 0.5, "activation is negative or not finite"),
        ([1.0], [-1.0], 0.5, "weight is negative or not finite"),
    ],
)
def test_refused(x: list[float], w: list[float], alpha: float, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        smoothing(np.array(x, np.float32), np.array(w, np.float32), alpha)
