"""GELU against PyTorch: large values of both signs, columns of wider rows, both variants."""

from __future__ import annotations

import pytest
import torch

from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import MANY, Workbench


@pytest.mark.parametrize(("op", "approximate"), [("Gelu", "none"), ("GeluTanh", "tanh")])
@pytest.mark.parametrize(("width", "steps", "batch"), [(1, 1, 1), (40, 3, 2), (700, 2, 1)])
def test_gelu_of_columns(op: str, approximate: str, width: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(width)
    x = 4 * torch.randn(steps * batch, width, generator=make)
    x[0, 0], x[-1, -1] = -60.0, 60.0
    bench = Workbench(MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.lower(LOWER, op, ("x",), ("y",))
    bench.run()
    expected = torch.nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(bench.read("y"), expected, atol=1e-6, rtol=1e-6)
