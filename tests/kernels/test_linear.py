"""Floating products as kernels, against the references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edge.plugins.lowering.context import Regime
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench

ONE = Regime("chain", 1)
# (regime, T, B, K, N): tails of every tile
SHAPES = [
    (ONE, 1, 1, 640, 96),
    (CHAIN, 5, 3, 160, 100),
    (CHAIN, 7, 1, 1160, 33),
    (CHAIN, 2, 2, 8, 1),
    (MANY, 17, 1, 200, 130),
    (MANY, 63, 3, 40, 24),
]


def _expected(x: Tensor, weight: Tensor) -> Tensor:
    """Return exact sums of the multiplied values: x itself, or rounded to fp16 for fp16 weights."""
    if weight.dtype == torch.float16:
        x = x.clamp(-65504, 65504).half()
    return F.linear(x.double(), weight.double()).float()


def _run(regime: Regime, steps: int, batch: int, x: Tensor, weight: Tensor) -> Tensor:
    bench = Workbench(regime, T=steps, B=batch, L=0)
    bench.value("x", x, stride=x.shape[1] + 8, start=4)
    bench.constant("weight", weight)
    bench.lower(LOWER, "Linear", ("x", "weight"), ("y",))
    bench.run()
    return bench.read("y")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("regime", "steps", "batch", "columns", "outputs"), SHAPES)
def test_products_are_the_references(
    regime: Regime, steps: int, batch: int, columns: int, outputs: int, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(columns)
    x = torch.randn(steps * batch, columns, generator=make)
    weight = (torch.randn(outputs, columns, generator=make) / 8).to(dtype)
    near = 1e-6 * columns**0.5
    y = _run(regime, steps, batch, x, weight)
    torch.testing.assert_close(y, _expected(x, weight), rtol=1e-5 * columns**0.5, atol=near)


@pytest.mark.parametrize(("regime", "steps"), [(CHAIN, 3), (MANY, 20)])
def test_what_fp16_cannot_hold_is_its_largest_value_and_nan_stays(
    regime: Regime, steps: int
) -> None:
    x = torch.ones(steps, 48)
    x[0, 3], x[1, 5], x[2, 7] = 1e9, -float("inf"), float("nan")
    weight = torch.full((20, 48), 0.5, dtype=torch.float16)
    y = _run(regime, steps, 1, x, weight)
    assert bool(y[2].isnan().all())
    assert torch.equal(y[:2], _expected(x[:2], weight))
    assert bool(y[:2].isfinite().all())
