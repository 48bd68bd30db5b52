"""Squared ReLU against PyTorch: both signs, NaN, columns of wider rows."""

from __future__ import annotations

import pytest
import torch

from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.squared_relu.reference import squared_relu
from tests.kernels.rowwise import MANY, Workbench


@pytest.mark.parametrize(("width", "steps", "batch"), [(1, 1, 1), (40, 3, 2), (700, 2, 1)])
def test_the_kernel_is_the_reference(width: int, steps: int, batch: int) -> None:
    x = 4 * torch.randn(steps * batch, width, generator=torch.Generator().manual_seed(width))
    x[-1, -1] = float("nan")
    bench = Workbench(MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.lower(LOWER, "SquaredRelu", ("x",), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), squared_relu(x), equal_nan=True)


RACES = (lambda: test_the_kernel_is_the_reference(700, 2, 1),)
