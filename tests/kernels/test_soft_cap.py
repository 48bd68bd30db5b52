"""The soft cap against PyTorch: values near 0 and far beyond, NaN, columns of wider rows."""

from __future__ import annotations

import pytest
import torch

from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.soft_cap.reference import soft_cap
from tests.kernels.rowwise import MANY, Workbench


@pytest.mark.parametrize(("width", "steps", "batch"), [(1, 1, 1), (40, 3, 2), (700, 2, 1)])
def test_the_kernel_is_the_reference(width: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(width)
    x = torch.randn(steps * batch, width, generator=make)
    x *= torch.logspace(-4, 3, width)
    x[-1, -1] = float("nan")
    bench = Workbench(MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.lower(LOWER, "SoftCap", ("x",), ("y",), cap=3.0)
    bench.run()
    torch.testing.assert_close(bench.read("y"), soft_cap(x, 3.0), equal_nan=True)


RACES = (lambda: test_the_kernel_is_the_reference(700, 2, 1),)
