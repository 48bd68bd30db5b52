"""The norm of heads against its reference: odd widths, columns of wider rows, many groups."""

from __future__ import annotations

import pytest
import torch

from edge.errors import ExportError
from edge.plugins.group_norm.reference import group_rms_norm, parts_rms_norm
from edge.plugins.lowering.lowerings import LOWER
from tests.facts import facts
from tests.kernels.rowwise import CHAIN, MANY, Workbench


@pytest.mark.parametrize(
    ("width", "groups", "steps", "batch"),
    [(1, 1, 1, 1), (21, 3, 5, 3), (640, 5, 2, 1), (96, 24, 17, 1)],
)
def test_the_kernel_is_the_reference(width: int, groups: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(width)
    rows = steps * batch
    x, weight = 3 * torch.randn(rows, width, generator=make), torch.rand(width, generator=make)
    x[-1] = 0
    bench = Workbench(CHAIN if rows <= 16 else MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.constant("weight", weight)
    bench.lower(LOWER, "GroupRMSNorm", ("x", "weight"), ("y",), eps=1e-5, groups=groups)
    bench.run()
    expected = group_rms_norm(x, weight, 1e-5, groups)
    torch.testing.assert_close(bench.read("y"), expected, rtol=2e-5, atol=2e-5)
    assert not bench.read("y")[-1].any()


@pytest.mark.parametrize(
    ("first", "half", "steps", "batch"), [(1, 1, 1, 1), (160, 16, 5, 3), (3, 40, 17, 1)]
)
def test_parts_are_the_reference(first: int, half: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(first)
    rows, width = steps * batch, first + 2 * half
    x, weight = 3 * torch.randn(rows, width, generator=make), torch.rand(width, generator=make)
    bench = Workbench(CHAIN if rows <= 16 else MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.constant("weight", weight)
    bench.lower(LOWER, "PartsRMSNorm", ("x", "weight"), ("y",), eps=1e-5, first=first)
    bench.run()
    expected = parts_rms_norm(x, weight, 1e-5, first)
    torch.testing.assert_close(bench.read("y"), expected, rtol=2e-5, atol=2e-5)


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    bench = Workbench(CHAIN, T=1, B=1)
    bench.value("x", torch.zeros(1, 8))
    bench.constant("weight", torch.ones(8))
    with pytest.raises(ExportError, match=facts("8 channels", "3 groups")):
        bench.lower(LOWER, "GroupRMSNorm", ("x", "weight"), ("y",), eps=1e-5, groups=3)
    with pytest.raises(ExportError, match=facts("8 values", 3, "halves")):
        bench.lower(LOWER, "PartsRMSNorm", ("x", "weight"), ("y",), eps=1e-5, first=3)


RACES = (
    lambda: test_the_kernel_is_the_reference(96, 24, 17, 1),
    lambda: test_parts_are_the_reference(3, 40, 17, 1),
)
