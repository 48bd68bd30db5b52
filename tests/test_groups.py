"""Scales for groups of Mamba-2's heads, channels and states."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import ExportError
from edge.export.quantize.scales import head_channel_scales, partition, ssd_group_scales
from tests.facts import facts

F32 = NDArray[np.float32]


def _noise(maxima: F32, labels: NDArray[np.int64]) -> float:
    return float(sum(maxima[labels == g].max() ** 2 * (labels == g).sum() for g in set(labels)))


def _least(maxima: F32, groups: int) -> float:
    """Try every way to cut the sorted values."""
    ordered = np.sort(maxima).astype(np.float64)
    found = []
    for cuts in combinations(range(1, len(ordered)), groups - 1):
        parts = np.split(ordered, cuts)
        found.append(sum(len(part) * part[-1] ** 2 for part in parts))
    return min(found)


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [4, 5, 9, 12])
def test_partition_is_the_best_there_is(count: int, groups: int) -> None:
    for seed in range(5):
        maxima = np.exp(np.random.default_rng(seed).normal(0, 1.5, count)).astype(np.float32)
        labels = partition(maxima, groups)
        assert _noise(maxima, labels) == pytest.approx(_least(maxima, groups), rel=1e-5)
        assert labels.max() < groups


def test_partition_finds_what_is_plainly_there() -> None:
    maxima = np.array([5, 0.1, 100, 5.1, 0.11, 100, 0.1], np.float32)
    np.testing.assert_array_equal(partition(maxima, 3), [1, 0, 2, 1, 0, 2, 0])
    # fewer distinct values than groups; and more groups than values
    np.testing.assert_array_equal(partition(np.zeros(4, np.float32), 4), [0, 0, 0, 0])
    np.testing.assert_array_equal(partition(np.array([3, 1], np.float32), 4), [1, 0])


def test_no_channel_is_clipped_and_quiet_ones_are_finer() -> None:
    random = np.random.default_rng(3)
    heads, width = 8, 16
    absmax = np.exp(random.normal(0, 1, (heads, width))).astype(np.float32)
    absmax[5] *= 20
    scales = head_channel_scales(absmax.reshape(-1), heads, 2)
    assert scales.shape == (heads * width,)
    assert (absmax.reshape(-1) <= scales * np.float32(127.001)).all()
    # two SSD groups of 4 heads: at most 16 scales each
    for half in np.split(scales, 2):
        assert 4 < len(np.unique(half)) <= 16
    # far less noise than one scale for all
    assert np.square(scales).mean() < 0.2 * (absmax.max() / 127) ** 2


def test_ssd_groups_do_not_share_scales() -> None:
    absmax = np.ones((2, 8), np.float32)
    absmax[1] = 50
    scales = head_channel_scales(absmax.reshape(-1), 2, 2)
    np.testing.assert_allclose(scales, np.repeat([1 / 127, 50 / 127], 8), rtol=1e-6)


def test_what_never_was_active_has_scale_1() -> None:
    absmax = np.zeros((2, 4), np.float32)
    absmax[0] = 3
    np.testing.assert_allclose(head_channel_scales(absmax.reshape(-1), 2, 2)[4:], 1)
    np.testing.assert_allclose(ssd_group_scales(absmax.reshape(-1), 2)[4:], 1)


def test_b_and_c_have_one_scale_an_ssd_group() -> None:
    absmax = np.array([1, 2, 3, 30, 20, 10], np.float32)
    expected = np.repeat([3 / 127, 30 / 127], 3)
    np.testing.assert_allclose(ssd_group_scales(absmax, 2), expected, rtol=1e-6)


def test_shapes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ExportError, match=facts("10 channels", "4 heads")):
        head_channel_scales(np.ones(10, np.float32), 4, 1)
    with pytest.raises(ExportError, match="do not divide into 3 SSD groups"):
        ssd_group_scales(np.ones(10, np.float32), 3)
