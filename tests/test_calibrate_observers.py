"""Observers: exact counts, merged in any order, and the clips that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.errors import ExportError
from edge.export.quantize.observers import Hessian, Statistics, scale_of


def values(kind: str) -> Tensor:
    """Return [512, 1, 64] numbers of a distribution."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(512, 1, 64, generator=generator)
    if kind == "outliers":
        # A few values of 10 among many below 1 (Quamba, figure 10).
        rare = torch.rand(512, 1, 64, generator=generator) < 1e-3
        return torch.where(rare, 10 * normal.sign(), 0.3 * normal)
    if kind == "skewed":
        return torch.nn.functional.silu(2 * normal)
    return normal


def seen(x: Tensor) -> Statistics:
    found = Statistics("layers.0.conv")
    found.observe(x)
    return found


def test_what_is_counted_is_exact() -> None:
    x = values("normal")
    x[3, 0, 5] = -77.25
    x[4, 0, 6] = 0.0
    found = seen(x)
    size = x.abs().numpy()
    assert found.count == x.numel() and found.absmax == 77.25
    np.testing.assert_array_equal(found.channel_absmax, size.max((0, 1)))
    bins = size.view(np.uint32) >> 16
    np.testing.assert_array_equal(found.counts, np.bincount(bins.ravel(), minlength=0x7F80))


def test_order_and_grouping_leave_no_trace() -> None:
    x = torch.cat([values(kind) for kind in ("normal", "outliers", "skewed")])
    whole = seen(x)
    rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    pieces = [seen(part) for part in x[rows].split([1, 700, 30, 805])]
    merged = Statistics("layers.0.conv")
    for part in reversed(pieces):
        merged.merge(part)
    np.testing.assert_array_equal(merged.counts, whole.counts)
    np.testing.assert_array_equal(merged.channel_absmax, whole.channel_absmax)
    assert merged.octav() == whole.octav() and merged.percentile(99.9) == whole.percentile(99.9)


def test_other_axes_than_channels() -> None:
    x = torch.randn(5, 1, 3, 4, 7, generator=torch.Generator().manual_seed(0))
    heads = Statistics("layers.0.ssm_states", (-3, -1))
    heads.observe(x)
    np.testing.assert_array_equal(heads.channel_absmax, x.abs().amax((0, 1, 3)).numpy())
    states = Statistics("layers.0.ssm_states", (-2,))
    states.observe(x)
    np.testing.assert_array_equal(states.channel_absmax, x.abs().amax((0, 1, 2, 4)).numpy())


@pytest.mark.parametrize("kind", ["normal", "outliers", "skewed"])
def test_percentiles_are_within_a_bin(kind: str) -> None:
    x = values(kind)
    found = seen(x)
    for p in (0.5, 25, 50, 90, 99, 99.9, 99.99, 99.999):
        exact = np.percentile(x.abs().numpy().astype(np.float64), p, method="inverted_cdf")
        assert abs(found.percentile(p) - exact) <= exact / 128
    assert found.percentile(100) == float(x.abs().max())
    rising = [found.percentile(p) for p in np.linspace(0.01, 100, 500)]
    assert rising == sorted(rising)


def test_percentiles_interpolate_within_a_bin() -> None:
    """1000 numbers spread evenly over one bin, from 1 to 1 + 1/128."""
    x = 1 + torch.arange(1000) / 128_000
    assert seen(x).percentile(40) == pytest.approx(1 + 0.4 / 128, abs=2e-5)


def squared_error(x: Tensor, clip: float, bits: int = 8) -> float:
    largest = 2 ** (bits - 1) - 1
    scale = clip / largest
    wide = x.double()
    return float(
        (torch.round(wide / scale).clamp(-largest, largest) * scale - wide).square().mean()
    )


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("kind", ["normal", "outliers", "skewed"])
def test_octav_is_the_papers_fixed_point_and_nearly_the_best_clip(kind: str, bits: int) -> None:
    x = values(kind)
    size = x.abs().double()
    # The recursion on the numbers themselves, as in the paper.
    noise, s = 1 / (12 * (2 ** (bits - 1) - 1) ** 2), float(size.mean())
    for _ in range(200):
        beyond = size > s
        s = float(size[beyond].sum() / (noise * (~beyond).sum() + beyond.sum()))
    found = seen(x).octav(bits)
    assert found == pytest.approx(s, rel=1 / 128)
    best = min(squared_error(x, c, bits) for c in np.linspace(0.02, 1, 200) * float(size.max()))
    assert squared_error(x, found, bits) <= 1.1 * best
    assert squared_error(x, found, bits) < squared_error(x, float(size.max()), bits)


def test_octav_of_one_value_all_but_keeps_it() -> None:
    for value in (1.0, 3.0, 1e-20, 1e20):
        assert seen(torch.full((9, 4), value)).octav() == pytest.approx(value, rel=1e-3)
    assert seen(torch.tensor([2.5])).octav() == pytest.approx(2.5, rel=1e-3)


def test_clipped_shares() -> None:
    x = values("outliers")
    found, size = seen(x), x.abs().numpy()
    # With absmax / 127 no rounding of the scale makes a value count as clipped.
    assert found.clipped(float(scale_of(found.absmax)[0])) == 0
    assert found.clipped(1e-30) == 1
    for scale in (0.002, 0.01, 5.0 / 127):
        share = float((size > 127.5 * scale).mean())
        assert found.clipped(scale) == pytest.approx(share, abs=0.01 * share)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(bad: float) -> None:
    x = values("normal")
    x[100, 0, 2] = bad
    for observer in (Statistics("layers.7.conv"), Hessian("layers.7.conv")):
        with pytest.raises(ExportError, match=r"layers\.7\.conv: .*NaN or infinite") as caught:
            observer.observe(x)
        assert caught.value.remedy is not None


def test_scales_are_never_zero() -> None:
    silent = seen(torch.zeros(4, 3))
    assert silent.absmax == silent.octav() == silent.percentile(99) == silent.clipped(1.0) == 0
    np.testing.assert_array_equal(scale_of(silent.absmax), np.ones(1, np.float32))
    tiny = np.array([0, 1e-45, 1e-40, 254], np.float32)
    np.testing.assert_array_equal(scale_of(tiny), np.array([1, 1, 1, 2], np.float32))
    assert scale_of(1.0).dtype == np.float32
    nothing = Statistics("layers.0.conv")
    assert nothing.count == nothing.absmax == nothing.percentile(50) == nothing.octav() == 0


def test_a_percentile_out_of_range_is_refused() -> None:
    for p in (0, -1, 100.1, float("nan")):
        with pytest.raises(ExportError, match="is not a percentile"):
            seen(values("normal")).percentile(p)


def test_hessians_sum_over_all_rows() -> None:
    found = Hessian("layers.0.normed")
    x = values("normal").reshape(64, 8, 64)
    for part in x.split(20):
        found.observe(part)
    rows = x.double().reshape(-1, 64).numpy()
    assert found.rows == len(rows) and found.total is not None
    assert found.total.dtype == np.float64
    np.testing.assert_allclose(found.total, rows.T @ rows, rtol=1e-12, atol=1e-9)
