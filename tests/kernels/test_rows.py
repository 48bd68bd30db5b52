"""Sums, picked columns and rows, and joined rows as kernels: exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.errors import ExportError
from edge.plugins.lowering.context import Constant
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench

SHAPES = [(1, 1, 1), (3, 2, 40), (17, 1, 1025), (1, 1, 2560)]


def _bench(steps: int, batch: int, width: int, wanted: int = 1) -> tuple[Workbench, Tensor, Tensor]:
    make = torch.Generator().manual_seed(width + steps)
    a, b = (torch.randn(steps * batch, width, generator=make) for _ in range(2))
    bench = Workbench(CHAIN if steps * batch <= 16 else MANY, T=steps, B=batch, L=wanted)
    bench.value("a", a, stride=width + 7, start=5)
    bench.value("b", b, stride=2 * width, start=width)
    return bench, a, b


@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_sums(steps: int, batch: int, width: int) -> None:
    bench, a, b = _bench(steps, batch, width)
    bias = torch.randn(width, generator=torch.Generator().manual_seed(1))
    bench.constant("bias", bias)
    bench.lower(LOWER, "Add", ("a", "b"), ("sum",))
    bench.lower(LOWER, "Add", ("a", "bias"), ("biased",))
    bench.lower(LOWER, "Add", ("bias", "b"), ("other",))
    bench.run()
    assert torch.equal(bench.read("sum"), a + b)
    assert torch.equal(bench.read("biased"), a + bias)
    assert torch.equal(bench.read("other"), b + bias)


def test_a_sum_of_other_widths_is_refused() -> None:
    bench, *_ = _bench(2, 1, 8)
    bench.constant("bias", torch.zeros(7))
    with pytest.raises(ExportError, match="different width"):
        bench.lower(LOWER, "Add", ("a", "bias"), ("sum",))


@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_picked_columns(steps: int, batch: int, width: int) -> None:
    bench, a, _ = _bench(steps, batch, width)
    columns = sorted({0, width // 3, width // 2, width - 1})
    bench.constant("columns", torch.tensor(columns))
    bench.lower(LOWER, "Gather", ("a", "columns"), ("few",), axis=-1)
    bench.run()
    assert torch.equal(bench.read("few"), a[:, columns])


@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_wanted_rows(steps: int, batch: int, width: int) -> None:
    rows = [steps - 1, 0, steps // 2]
    bench, a, _ = _bench(steps, batch, width, wanted=len(rows))
    bench.given("input", "rows", torch.tensor(rows, dtype=torch.int32))
    bench.lower(LOWER, "Gather", ("a", "rows"), ("wanted",), axis=0)
    bench.run()
    expected = a.view(steps, batch, width)[rows].reshape(-1, width)
    assert torch.equal(bench.read("wanted"), expected)


@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_joined_rows(steps: int, batch: int, width: int, dtype: torch.dtype) -> None:
    bench, *_ = _bench(steps, batch, width)
    make = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-128, 128, (steps * batch, wide), generator=make).to(dtype)
        for wide in (width, width + 9)
    )
    bench.value("a", a, stride=width + 4, start=2)
    bench.value("b", b)
    bench.lower(LOWER, "Concat", ("a", "b"), ("both",), axis=-1)
    bench.run()
    assert torch.equal(bench.read("both"), torch.cat([a, b], -1))


def test_a_long_list_of_columns_has_a_name_that_fits_the_plan() -> None:
    name = "const." + "_".join(map(str, range(0, 400, 2)))
    columns = torch.arange(0, 400, 2)
    bench = Workbench(CHAIN, T=2)
    bench.value("x", torch.arange(800, dtype=torch.float32).view(2, 400))
    bench.constants[name] = Constant(name, "inline", "i64", (200,), lambda: columns.numpy())
    bench.lower(LOWER, "Gather", ("x", name), ("y",), axis=-1)
    (stored,) = bench.tables.inline
    assert len(stored) <= 256
    bench.given("inline", stored, columns)
    bench.run()
    assert torch.equal(bench.read("y"), torch.arange(800.0).view(2, 400)[:, ::2])
