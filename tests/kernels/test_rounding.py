"""Rounding to int8 and back as kernels, against the references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.quantize.reference import (
    dequantize,
    fake_quantize,
    fake_quantize_rows,
    quantize,
    quantize_rows,
    split_quantize_rows,
)
from tests.kernels.rowwise import CHAIN, MANY, Workbench

SHAPES = [(1, 1, 1), (7, 2, 40), (17, 1, 1024), (2, 3, 1537), (1, 1, 5120)]


def _bench(steps: int, batch: int, width: int) -> tuple[Workbench, Tensor]:
    make = torch.Generator().manual_seed(width + steps)
    x = torch.randn(steps * batch, width, generator=make) * 2
    bench = Workbench(CHAIN if steps * batch <= 16 else MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 3, start=1)
    return bench, x


def _scale(one: bool, width: int) -> Tensor:
    make = torch.Generator().manual_seed(width)
    return torch.full((1,), 0.03) if one else torch.rand(width, generator=make) * 0.05 + 0.01


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_known_scales(steps: int, batch: int, width: int, one: bool) -> None:
    scale = _scale(one, width)
    for op, reference in (("Quantize", quantize), ("FakeQuantize", fake_quantize)):
        bench, x = _bench(steps, batch, width)
        x[0, : width // 2] = scale[:1] * (torch.arange(width // 2) % 40 - 20 + 0.5)  # ties
        bench.value("x", x, stride=width + 3, start=1)
        bench.constant("scale", scale)
        bench.lower(LOWER, op, ("x", "scale"), ("y",))
        bench.run()
        assert torch.equal(bench.read("y"), reference(x, scale))


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_dequantize(steps: int, batch: int, width: int, one: bool) -> None:
    bench, x = _bench(steps, batch, width)
    q, scale = quantize(x, torch.full((1,), 0.02)), _scale(one, width)
    bench.value("q", q, stride=width + 16, start=16)
    bench.constant("scale", scale)
    bench.lower(LOWER, "Dequantize", ("q", "scale"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y"), dequantize(q, scale))


@pytest.mark.parametrize(("steps", "batch", "width"), SHAPES)
def test_scales_of_rows(steps: int, batch: int, width: int) -> None:
    bench, x = _bench(steps, batch, width)
    x[-1] = 0  # a row of zeros has scale 1
    bench.value("x", x, stride=width + 3, start=1)
    bench.lower(LOWER, "QuantizeRows", ("x",), ("y", "scale"))
    bench.lower(LOWER, "FakeQuantizeRows", ("x",), ("back",))
    bench.lower(LOWER, "SplitQuantizeRows", ("x",), ("y2", "scale2", "outliers"), threshold=2.5)
    bench.run()
    y, scale = quantize_rows(x)
    assert torch.equal(bench.read("scale"), scale) and float(scale[-1]) == 1
    assert torch.equal(bench.read("y"), y)
    assert torch.equal(bench.read("back"), fake_quantize_rows(x))
    split = split_quantize_rows(x, 2.5)
    for name, wanted in zip(("y2", "scale2", "outliers"), split, strict=True):
        assert torch.equal(bench.read(name), wanted)


def test_a_nan_is_the_least_value() -> None:
    bench, x = _bench(2, 1, 40)
    x = x.clamp(-3, 3)
    x[0, ::3], x[1, 39] = float("nan"), -float("nan")
    bench.value("x", x, stride=43, start=1)
    bench.constant("scale", torch.full((1,), 0.03))
    bench.lower(LOWER, "Quantize", ("x", "scale"), ("y",))
    bench.run()
    assert torch.equal(bench.read("y") == -128, x.isnan())
