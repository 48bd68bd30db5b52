"""Gates and gated norms as kernels, against the references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from edge.errors import ExportError
from edge.plugins.gated_norm.reference import gated_rms_norm, gated_rms_norm_int8, head_gate
from edge.plugins.hadamard.matrices import factors
from edge.plugins.hadamard.reference import hadamard
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.quantize.reference import quantize
from tests.facts import facts
from tests.kernels.rowwise import CHAIN, MANY, Workbench, assert_steps

EPS = 1e-5
# (width, groups, T, B)
SHAPES = [(1, 1, 1, 1), (80, 1, 5, 3), (96, 3, 17, 1), (192, 8, 2, 2), (5120, 1, 1, 2)]


def _bench(width: int, steps: int, batch: int, int8: bool) -> tuple[Workbench, list[Tensor]]:
    make = torch.Generator().manual_seed(width + steps)
    rows = steps * batch
    x, z, weight = (torch.randn(n, width, generator=make) * 3 for n in (rows, rows, 1))
    if int8:
        z = torch.randint(-128, 128, (rows, width), generator=make, dtype=torch.int8)
    bench = Workbench(CHAIN if rows <= 16 else MANY, T=steps, B=batch)
    bench.value("x", x, stride=width + 3, start=2)
    # the gate is a part of the input projection's output
    bench.value("z", z, stride=2 * width + 7, start=width)
    bench.constant("weight", weight[0])
    return bench, [x, z, weight[0]]


@pytest.mark.parametrize(("width", "groups", "steps", "batch"), SHAPES)
def test_gated_norm_is_the_reference(width: int, groups: int, steps: int, batch: int) -> None:
    bench, (x, z, weight) = _bench(width, steps, batch, False)
    bench.lower(LOWER, "GatedRMSNorm", ("x", "z", "weight"), ("y",), eps=EPS, groups=groups)
    bench.run()
    expected = gated_rms_norm(x, z, weight, EPS, groups)
    torch.testing.assert_close(bench.read("y"), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("width", "groups", "steps", "batch"), SHAPES)
def test_gate_in_int8(width: int, groups: int, steps: int, batch: int, one: bool) -> None:
    bench, (x, z, weight) = _bench(width, steps, batch, True)
    make = torch.Generator().manual_seed(2)
    scale = torch.full((1,), 0.05) if one else torch.rand(width, generator=make) * 0.1 + 0.01
    bench.constant("z_scale", scale)
    names = ("x", "z", "z_scale", "weight")
    bench.lower(LOWER, "GatedRMSNormInt8", names, ("y",), eps=EPS, groups=groups)
    bench.run()
    expected = gated_rms_norm_int8(x, z, scale, weight, EPS, groups)
    torch.testing.assert_close(bench.read("y"), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("width", "steps", "batch"), [(1, 1, 1), (80, 5, 3), (1300, 7, 2)])
@pytest.mark.parametrize(("op", "gate"), [("SiluGate", F.silu), ("SigmoidGate", torch.sigmoid)])
def test_gates_alone_are_the_references(
    op: str, gate: Callable[[Tensor], Tensor], width: int, steps: int, batch: int
) -> None:
    bench, (x, z, _) = _bench(width, steps, batch, False)
    bench.lower(LOWER, op, ("x", "z"), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), x * gate(z), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "values", "steps", "batch"), [(1, 8, 1, 1), (3, 24, 5, 3), (16, 128, 2, 1)]
)
def test_a_gate_a_head_is_the_reference(heads: int, values: int, steps: int, batch: int) -> None:
    bench, (x, *_) = _bench(heads * values, steps, batch, False)
    z = 3 * torch.randn(steps * batch, heads, generator=torch.Generator().manual_seed(3))
    bench.value("gate", z, stride=heads + 5, start=2)
    bench.lower(LOWER, "HeadGate", ("x", "gate"), ("y",), heads=heads)
    bench.run()
    torch.testing.assert_close(bench.read("y"), head_gate(x, z, heads), rtol=2e-5, atol=2e-5)


RACES = (
    lambda: test_gates_alone_are_the_references("SigmoidGate", torch.sigmoid, 1300, 7, 2),
    lambda: test_a_gate_a_head_is_the_reference(16, 128, 2, 1),
)


def test_a_row_of_zeros_is_zero() -> None:
    bench, (x, *_) = _bench(96, 1, 1, False)
    bench.value("x", torch.zeros_like(x))
    bench.lower(LOWER, "GatedRMSNorm", ("x", "z", "weight"), ("y",), eps=EPS, groups=3)
    bench.run()
    assert not bench.read("y").any()


def test_nan_stays_in_its_group() -> None:
    bench, (x, *_) = _bench(96, 1, 1, False)
    x[0, 40] = float("nan")
    bench.value("x", x)
    bench.lower(LOWER, "GatedRMSNorm", ("x", "z", "weight"), ("y",), eps=EPS, groups=3)
    bench.run()
    y = bench.read("y")
    assert y[:, 32:64].isnan().all()
    assert y[:, :32].isfinite().all() and y[:, 64:].isfinite().all()


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    bench, _ = _bench(80, 1, 1, False)
    with pytest.raises(ExportError, match=facts("80 channels", "3 groups")):
        bench.lower(LOWER, "GatedRMSNorm", ("x", "z", "weight"), ("y",), eps=EPS, groups=3)


# p · q is 8·64, 40·64 (not symmetric), 28·64, 24·64, 25·4 (blocks), 80·64 and 1·8
ROTATED = [(512, 2, 3), (2560, 1, 1), (1792, 3, 1), (1536, 16, 1), (100, 5, 1), (5120, 1, 2),
           (8, 2, 1)]  # fmt: skip


def _rotated(
    width: int, steps: int, batch: int, groups: int, one: bool
) -> tuple[Workbench, Tensor]:
    """Return the bench with the fused op lowered, and its expected output."""
    bench, (x, z, weight) = _bench(width, steps, batch, True)
    make = torch.Generator().manual_seed(3)
    z_scale, scale = (
        torch.full((1,), size) if one else (torch.rand(width, generator=make) + 0.5) * size
        for size in (0.05, 0.04)
    )
    slow, fast = (torch.tensor(part) for part in factors(width))
    for name, array in (("z_scale", z_scale), ("slow", slow), ("fast", fast), ("scale", scale)):
        bench.constant(name, array)
    names = ("x", "z", "z_scale", "weight", "slow", "fast", "scale")
    op = "GatedRMSNormInt8HadamardQuantize"
    bench.lower(LOWER, op, names, {"y": "y"}, eps=EPS, groups=groups)
    normed = gated_rms_norm_int8(x, z, z_scale, weight, EPS, groups)
    return bench, quantize(hadamard(normed, slow, fast), scale)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("width", "steps", "batch"), ROTATED)
def test_rotated_and_rounded(width: int, steps: int, batch: int, one: bool) -> None:
    bench, expected = _rotated(width, steps, batch, 1, one)
    bench.run()
    assert len(bench.lowering.order) == 1
    assert_steps(bench.read("y"), expected)
    assert width < 100 or (expected.abs() > 20).any()


def test_rows_of_several_groups_are_normed_first() -> None:
    bench, expected = _rotated(512, 2, 1, 4, True)
    bench.run()
    assert len(bench.lowering.order) == 2
    assert_steps(bench.read("y"), expected)


def test_factors_of_another_width_are_refused() -> None:
    bench, _ = _rotated(512, 1, 1, 1, True)
    bench.constant("fast", torch.eye(32))
    names = ("x", "z", "z_scale", "weight", "slow", "fast", "scale")
    with pytest.raises(ExportError, match="rotates 512 values by 8 x 32"):
        op = "GatedRMSNormInt8HadamardQuantize"
        bench.lower(LOWER, op, names, {"y": "w"}, eps=EPS, groups=1)
