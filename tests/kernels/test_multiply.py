"""Products of columns of wider rows, against PyTorch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from edge.errors import ExportError
from edge.plugins.lowering.lowerings import LOWER
from tests.facts import facts
from tests.kernels.rowwise import MANY, Workbench


@pytest.mark.parametrize(("width", "steps", "batch"), [(1, 1, 1), (40, 3, 2), (700, 2, 1)])
def test_the_kernel_is_the_reference(width: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(width)
    x, z = (torch.randn(steps * batch, width, generator=make) for _ in range(2))
    bench = Workbench(MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 5, start=3)
    bench.value("z", z, stride=3 * width, start=width)
    bench.lower(LOWER, "Multiply", ("x", "z"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y"), x * z)


def test_other_widths_are_refused() -> None:
    bench = Workbench(MANY, T=1)
    bench.value("x", torch.zeros(1, 8))
    bench.value("z", torch.zeros(1, 4))
    with pytest.raises(ExportError, match=facts("Multiply", 8, 4, "channels")):
        bench.lower(LOWER, "Multiply", ("x", "z"), ("y",))


RACES = (lambda: test_the_kernel_is_the_reference(700, 2, 1),)
