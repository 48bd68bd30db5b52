"""Products with 8- and 4-bit weights as kernels, against the references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from edge.launch import Size
from edge.plugins.linear.reference import dequantize_bits, dequantize_minimum
from edge.plugins.lowering.context import Regime, cdiv
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.quantize.reference import fake_quantize_rows
from tests import on_device
from tests.kernels.rowwise import CHAIN, MANY, Workbench

ONE = Regime("chain", 1)


# blocks of 20 are not a power of two; 128 takes two pieces; 1,060 outputs fill no tile, and few
# rows are multiplied in three ways
SHAPES = [
    (ONE, 1, 1, 640, 48, 128),
    (CHAIN, 5, 3, 160, 100, 32),
    (CHAIN, 4, 1, 384, 33, 128),
    (CHAIN, 7, 1, 100, 33, 20),
    (CHAIN, 2, 1, 160, 1060, 32),
    (CHAIN, 3, 1, 96, 1060, 48),
    (CHAIN, 7, 1, 96, 1060, 32),
    (CHAIN, 13, 1, 100, 1060, 20),
    (MANY, 17, 1, 384, 70, 128),
    (MANY, 21, 3, 100, 24, 20),
    (MANY, 29, 1, 352, 33, 32),
    (ONE, 1, 1, 352, 5, 16),
    (ONE, 1, 1, 36, 5, 12),
]
# start 1 misaligns the pairs of 4-bit columns; of 8-bit ones it is in every other shape
CASES = [
    *((*shape, 4, start) for shape in SHAPES for start in (0, 1)),
    *((*shape, 8, i % 2) for i, shape in enumerate(SHAPES)),
]


@pytest.mark.parametrize(
    ("regime", "steps", "batch", "columns", "outputs", "block", "bits", "start"), CASES
)
def test_products_are_the_references(
    regime: Regime,
    steps: int,
    batch: int,
    columns: int,
    outputs: int,
    block: int,
    bits: int,
    start: int,
) -> None:
    make = torch.Generator().manual_seed(columns + outputs)
    x = torch.randn(steps * batch, columns, generator=make)
    if len(x) > 1:
        x[0, 2] = 1e6  # beyond fp16; the tolerance of this row hides other mistakes
    shape = (outputs, columns // block, block * bits // 8)
    packed = torch.randint(256, shape, generator=make, dtype=torch.uint8)
    scales = torch.randn(shape[:2], generator=make) * 0.01
    feeds = {"packed": packed, "scales": scales}
    multiply(regime, (steps, batch), x, feeds, dequantize_bits(packed, scales, bits), start)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("regime", "steps", "batch", "columns", "outputs", "block"),
    [
        (ONE, 1, 1, 640, 48, 128),
        (ONE, 1, 1, 96, 1060, 48),
        (CHAIN, 5, 3, 160, 100, 32),
        (CHAIN, 7, 1, 100, 33, 20),
        (CHAIN, 4, 1, 160, 1060, 32),
        (CHAIN, 5, 1, 160, 1060, 32),
        (MANY, 29, 1, 1120, 33, 32),
        (MANY, 17, 1, 384, 40, 128),
        (ONE, 1, 1, 352, 5, 16),
    ],
)
def test_blocks_with_a_minimum(
    regime: Regime,
    steps: int,
    batch: int,
    columns: int,
    outputs: int,
    block: int,
    dtype: torch.dtype,
) -> None:
    make = torch.Generator().manual_seed(columns + outputs)
    x = torch.randn(steps * batch, columns, generator=make) + 0.5
    shape = (outputs, columns // block, block // 2)
    packed = torch.randint(256, shape, generator=make, dtype=torch.uint8)
    scales = (torch.rand(shape[:2], generator=make) * 0.01).to(dtype)
    minimums = (-7 * scales.float() + 0.01 * torch.randn(shape[:2], generator=make)).to(dtype)
    feeds = {"packed": packed, "scales": scales, "minimums": minimums}
    multiply(regime, (steps, batch), x, feeds, dequantize_minimum(**feeds))


def multiply(
    regime: Regime,
    size: tuple[int, int],
    x: torch.Tensor,
    feeds: dict[str, torch.Tensor],
    weight: torch.Tensor,
    start: int = 0,
) -> None:
    """Compare the kernel's x · weightᵀ with the product in fp64."""
    (outputs, columns), (count, width) = weight.shape, feeds["packed"].shape[1:]
    block = columns // count
    bench = Workbench(regime, T=size[0], B=size[1], L=0)
    bench.value("x", x, stride=columns + 8, start=start)
    for name, array in feeds.items():
        bench.constant(name, array)
    op = "LinearBitsMinimum" if "minimums" in feeds else "LinearBits"
    sizes = {"K": columns, "N": outputs, "bits": width * 8 // block, "block_size": block}
    bench.lower(LOWER, op, ("x", *feeds), ("y",), **sizes)
    bench.run()
    taken = x
    if not by_threads(bench, len(x)):  # tensor cores multiply fp16 values
        taken = x.clamp(-65504, 65504).half()
    if regime.many and width * 8 == 4 * block and not on_device.native():
        weight = weight.half()
    if on_device.native():  # rounded to int8 in the same blocks
        taken = fake_quantize_rows(x.unflatten(1, (-1, block))).flatten(1)
    expected = F.linear(taken.double(), weight.double())
    if "minimums" in feeds and not (regime.many or on_device.native()):
        # minimums are multiplied by the sum of x as it is
        least = feeds["minimums"].repeat_interleave(block, 1)
        expected += F.linear(x.double() - taken.double(), least.double())
    expected = expected.float()
    near = 1e-5 * columns**0.5
    # products of the first row may reach some 10⁴, and the sums lose digits in proportion
    first = max(1.0, float(x[0].abs().max()) / 100)
    torch.testing.assert_close(bench.read("y")[:1], expected[:1], rtol=near, atol=first * near)
    torch.testing.assert_close(bench.read("y")[1:], expected[1:], rtol=near, atol=near)


# constants that the plan of 2026-11-26 had for these kernels, instead of today's
EARLIER = {
    "one": {"WORD": 4, "WORDS": 4, "BLOCKS": 16, "BLOCK_N": 16, "STAGES": 3},
    "few": {"BLOCK_N": 16, "BLOCK_K": 32, "UNROLL": 5, "STAGES": 4},
}
OWN = {"ALONE", "WORD", "WORDS", "UNIT", "BLOCKS", "ALIGNED"}


@pytest.mark.parametrize(("regime", "steps"), [(ONE, 1), (CHAIN, 3), (CHAIN, 11)])
def test_plans_of_earlier_versions_have_the_same_products(regime: Regime, steps: int) -> None:
    make = torch.Generator().manual_seed(steps)
    x = torch.randn(steps, 160, generator=make)
    packed = torch.randint(256, (70, 5, 16), generator=make, dtype=torch.uint8)
    scales = torch.randn(70, 5, generator=make) * 0.01
    bench = Workbench(regime, T=steps, B=1, L=0)
    bench.value("x", x)
    bench.constant("packed", packed)
    bench.constant("scales", scales)
    sizes = {"K": 160, "N": 70, "bits": 4, "block_size": 32}
    bench.lower(LOWER, "LinearBits", ("x", "packed", "scales"), ("y",), **sizes)
    ((key, (number, variant)),) = bench.tables.variants.items()
    kind = variant.kernel.rpartition(".")[2]
    kept = {name: value for name, value in variant.constants.items() if name not in OWN}
    earlier = variant.model_copy(update={"constants": kept | EARLIER[kind], "warps": 1})
    bench.tables.variants[key] = number, earlier
    ((place, (number, launch)),) = bench.tables.launches.items()
    grid = (Size(), Size(times=cdiv(70, 16)), Size())
    bench.tables.launches[place] = number, launch.model_copy(update={"grid": grid})
    bench.run()
    taken = x if kind == "one" else x.half().float()
    if on_device.native():
        taken = fake_quantize_rows(x.unflatten(1, (-1, 32))).flatten(1)
    expected = F.linear(taken, dequantize_bits(packed, scales, 4))
    torch.testing.assert_close(bench.read("y"), expected, rtol=1e-4, atol=1e-4)


def by_threads(bench: Workbench, rows: int) -> bool:
    """Return whether the kernel multiplies so many rows without tensor cores, in fp32."""
    ((_, variant),) = bench.tables.variants.values()
    alone = variant.constants.get("ALONE", 0)
    return variant.kernel.endswith(".one") or (isinstance(alone, int) and rows <= alone)


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
@pytest.mark.parametrize("outputs", [8, 1024])
@pytest.mark.parametrize(("regime", "steps"), [(ONE, 1), (CHAIN, 3), (MANY, 19)])
def test_what_is_not_finite_is_seen(
    regime: Regime, steps: int, outputs: int, spoiled: float
) -> None:
    x = torch.ones(steps, 64)
    x[steps - 1, 40] = spoiled
    bench = Workbench(regime, T=steps, B=1, L=0)
    bench.value("x", x)
    bench.constant("packed", torch.full((outputs, 2, 32), 200, dtype=torch.uint8))
    bench.constant("scales", torch.ones(outputs, 2))
    sizes = {"K": 64, "N": outputs, "bits": 8, "block_size": 32}
    bench.lower(LOWER, "LinearBits", ("x", "packed", "scales"), ("y",), **sizes)
    bench.run()
    *others, found = bench.read("y")
    # where x is rounded to fp16, inf becomes the largest fp16 value
    rounded = not by_threads(bench, steps) and not on_device.native()
    finite = spoiled == spoiled and rounded
    assert bool((found.isfinite() == finite).all())
    assert all(bool(other.isfinite().all()) for other in others)
