"""RMSNorm and LayerNorm as kernels, against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.launch import Size
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.norm.reference import layer_norm, rms_norm
from edge.plugins.quantize.reference import quantize
from tests.kernels.rowwise import CHAIN, MANY, Workbench, assert_steps

EPS = 1e-5
OPS = ["RMSNorm", "AddRMSNorm", "LayerNorm", "AddLayerNorm"]


def _normed(op: str, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return layer_norm(h, weight, bias, EPS) if "Layer" in op else rms_norm(h, weight, EPS)


def _bench(width: int, steps: int, batch: int, wanted: int = 1) -> tuple[Workbench, list[Tensor]]:
    make = torch.Generator().manual_seed(width * 100 + steps)
    rows = steps * batch
    x, added = (torch.randn(rows, width, generator=make) * 3 + 1 for _ in range(2))
    weight, bias = (torch.randn(width, generator=make) for _ in range(2))
    bench = Workbench(CHAIN if rows <= 16 else MANY, T=steps, B=batch, L=wanted)
    # a view in the middle of wider rows, as after a split of channels
    bench.value("x", x, stride=width + 5, start=3)
    bench.value("added", added)
    bench.constant("weight", weight)
    bench.constant("bias", bias)
    return bench, [x, added, weight, bias]


def _inputs(op: str, scale: bool = False) -> tuple[str, ...]:
    names = ["x", *(["added"] if op.startswith("Add") else []), "weight"]
    return (*names, *(["bias"] if "Layer" in op else []), *(["scale"] if scale else []))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("width", "steps", "batch"), [(1, 1, 1), (80, 5, 3), (257, 17, 1), (2560, 1, 2), (5120, 3, 1)]
)
def test_norms_are_the_references(op: str, width: int, steps: int, batch: int) -> None:
    bench, (x, added, weight, bias) = _bench(width, steps, batch)
    outputs = ("y", "sum") if op.startswith("Add") else ("y",)
    bench.lower(LOWER, op, _inputs(op), outputs, eps=EPS)
    bench.run()
    h = x + added if op.startswith("Add") else x
    torch.testing.assert_close(bench.read("y"), _normed(op, h, weight, bias), rtol=2e-5, atol=2e-5)
    if op.startswith("Add"):
        assert torch.equal(bench.read("sum"), h)


@pytest.mark.parametrize("op", ["RMSNormQuantize", "AddRMSNormQuantize"])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("width", "steps", "batch"), [(96, 17, 2), (2560, 7, 1)])
def test_rounded_norms_are_the_references(
    op: str, one: bool, width: int, steps: int, batch: int
) -> None:
    bench, (x, added, weight, _) = _bench(width, steps, batch)
    scale = torch.full((1,), 0.02) if one else torch.rand(width) * 0.03 + 0.01
    bench.constant("scale", scale)
    outputs = ("y", "sum") if op.startswith("Add") else ("y",)
    bench.lower(LOWER, op, _inputs(op, scale=True), outputs, eps=EPS)
    bench.run()
    h = x + added if op.startswith("Add") else x
    expected = quantize(rms_norm(h, weight, EPS), scale)
    assert int((expected.abs() == 127).sum()) > 0  # some values saturate
    assert_steps(bench.read("y"), expected)
    if op.startswith("Add"):
        assert torch.equal(bench.read("sum"), h)


@pytest.mark.parametrize("op", OPS)
def test_only_wanted_rows_are_normed(op: str) -> None:
    """Row l·B+b of the result comes from rows[l]·B+b of x and of added."""
    width, steps, batch, rows = 40, 5, 3, [4, 0, 2, 2]
    bench, (x, added, weight, bias) = _bench(width, steps, batch, wanted=len(rows))
    bench.given("input", "rows", torch.tensor(rows, dtype=torch.int32))
    outputs = ("y", "sum") if op.startswith("Add") else ("y",)
    bench.lower(LOWER, op, _inputs(op), outputs, eps=EPS, rows=True)
    bench.run()
    assert bench.tables.inputs["rows"].elements == Size(of="L")
    h = x + added if op.startswith("Add") else x
    h = h.view(steps, batch, width)[rows].reshape(-1, width)
    torch.testing.assert_close(bench.read("y"), _normed(op, h, weight, bias), rtol=2e-5, atol=2e-5)
    if op.startswith("Add"):
        assert torch.equal(bench.read("sum"), h)


def test_a_sum_that_nobody_reads_is_not_written() -> None:
    bench, (x, added, weight, _) = _bench(64, 2, 1)
    bench.lower(LOWER, "AddRMSNorm", ("x", "added", "weight"), ("y", ""), eps=EPS)
    bench.run()
    torch.testing.assert_close(bench.read("y"), rms_norm(x + added, weight, EPS))
    assert set(bench.tables.values) == {"y"}
