"""int8 products as kernels, against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.plugins.linear.reference import linear_int8, linear_int8_quantize
from edge.plugins.lowering.context import Regime
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench, assert_steps

ONE = Regime("chain", 1)
# (regime, T, B, K, N): tails of every tile; K=160 and N=576 are those of dt_proj and Mamba-2's
# in_proj
FEW = [(ONE, 1, 1, 640, 256), (CHAIN, 5, 3, 192, 100), (CHAIN, 7, 1, 1160, 33), (CHAIN, 2, 2, 8, 1)]
ROWS = [(MANY, 17, 1, 200, 130), (MANY, 63, 3, 64, 24), (MANY, 9, 1, 1160, 40)]


def _int8(make: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=make, dtype=torch.int8)


def _scale(make: torch.Generator, size: int) -> Tensor:
    return torch.rand(size, generator=make) * 0.02 + 0.001


def _bench(
    regime: Regime, steps: int, batch: int, columns: int, outputs: int, scales: int
) -> tuple[Workbench, dict[str, Tensor]]:
    """Set x as a view inside wider rows; `scales` of the weight and of y: 1, or one per channel."""
    make = torch.Generator().manual_seed(columns + outputs)
    given = {
        "x": _int8(make, steps * batch, columns),
        "x_scale": _scale(make, 1),
        "weight": _int8(make, outputs, columns),
        "weight_scale": _scale(make, scales),
        "y_scale": _scale(make, scales) * columns,
    }
    bench = Workbench(regime, T=steps, B=batch, L=0)
    bench.value("x", given["x"], stride=columns + 16, start=16)
    for name in ("x_scale", "weight", "weight_scale", "y_scale"):
        bench.constant(name, given[name])
    return bench, given


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("regime", "steps", "batch", "columns", "outputs"), FEW + ROWS)
def test_products_are_exact_until_they_are_scaled(
    regime: Regime, steps: int, batch: int, columns: int, outputs: int, channels: bool
) -> None:
    scales = outputs if channels else 1
    bench, given = _bench(regime, steps, batch, columns, outputs, scales)
    inputs = ("x", "x_scale", "weight", "weight_scale")
    bench.lower(LOWER, "LinearInt8", inputs, ("y",))
    bench.lower(LOWER, "LinearInt8Quantize", (*inputs, "y_scale"), ("q",))
    bench.run()
    assert torch.equal(bench.read("y"), linear_int8(*(given[name] for name in inputs)))
    rounded = linear_int8_quantize(*(given[name] for name in (*inputs, "y_scale")))
    assert torch.equal(bench.read("q"), rounded)
    assert len(rounded.unique()) > 1


@pytest.mark.parametrize(("regime", "steps", "batch", "columns", "outputs"), [FEW[1], ROWS[0]])
def test_every_row_can_have_its_own_scale(
    regime: Regime, steps: int, batch: int, columns: int, outputs: int
) -> None:
    bench, given = _bench(regime, steps, batch, columns, outputs, outputs)
    row_scale = _scale(torch.Generator().manual_seed(1), steps * batch)[:, None]
    bench.value("row_scale", row_scale)
    inputs = ("x", "row_scale", "weight", "weight_scale")
    bench.lower(LOWER, "LinearInt8Rows", inputs, ("y",))
    bench.run()
    expected = linear_int8(given["x"], row_scale, given["weight"], given["weight_scale"])
    assert torch.equal(bench.read("y"), expected)


def test_the_tile_of_a_large_model_is_exact() -> None:
    """in_proj's K of 2560 with the tiles for its many outputs; the largest possible sums."""
    columns, outputs = 2560, 8192
    weight = torch.full((outputs, columns), -128, dtype=torch.int8)
    x = torch.full((1, columns), -128, dtype=torch.int8)
    weight[1::3], x[:, 5] = 127, 127
    bench = Workbench(ONE)
    bench.value("x", x)
    one = torch.ones(1)
    for name, array in {"one": one, "weight": weight}.items():
        bench.constant(name, array)
    bench.lower(LOWER, "LinearInt8", ("x", "one", "weight", "one"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y"), linear_int8(x, one, weight, one))


def test_wanted_rows_are_a_size_of_their_own() -> None:
    """The head has L·B rows, whatever number of tokens the program takes."""
    make = torch.Generator().manual_seed(5)
    x, weight, one = _int8(make, 3, 96), _int8(make, 40, 96), torch.full((1,), 0.01)
    bench = Workbench(MANY, T=20, L=3)
    bench.value("x", x)
    for name, array in {"one": one, "weight": weight}.items():
        bench.constant(name, array)
    bench.lower(LOWER, "LinearInt8Quantize", ("x", "one", "weight", "one", "one"), ("y",))
    bench.run()
    assert_steps(bench.read("y"), linear_int8_quantize(x, one, weight, one, one))
