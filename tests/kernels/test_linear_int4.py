"""Products of int8 rows with 4-bit weights as kernels, against the references."""

from __future__ import annotations

import pytest
import torch

from edge.plugins.linear import reference
from edge.plugins.lowering.context import Regime
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench, assert_steps

ONE = Regime("chain", 1)


# blocks of 20 are not a power of two; 5 blocks are not a multiple of a step's
SHAPES = [
    (ONE, 1, 1, 640, 48, 128),
    (CHAIN, 5, 3, 160, 100, 32),
    (CHAIN, 7, 1, 100, 33, 20),
    (CHAIN, 3, 1, 160, 1060, 32),
    (CHAIN, 6, 1, 160, 1060, 32),
    (CHAIN, 9, 1, 96, 1060, 48),
    (MANY, 17, 1, 256, 70, 128),
    (MANY, 21, 3, 100, 24, 20),
]
KEPT = (None, torch.float16, torch.float32)
# start 1 misaligns pairs: each shape and each kind of minimums has it once or twice
CASES = [
    (*shape, (i + j) % 2, kept) for i, shape in enumerate(SHAPES) for j, kept in enumerate(KEPT)
]


@pytest.mark.parametrize(
    ("regime", "steps", "batch", "columns", "outputs", "block", "start", "kept"), CASES
)
def test_products_are_the_references(
    regime: Regime,
    steps: int,
    batch: int,
    columns: int,
    outputs: int,
    block: int,
    start: int,
    kept: torch.dtype | None,
) -> None:
    make = torch.Generator().manual_seed(columns + outputs)
    x = torch.randint(-128, 128, (steps * batch, columns), generator=make, dtype=torch.int8)
    x[0, 0], x[0, -1] = -128, 127
    packed = torch.randint(
        256, (outputs, columns // block, block // 2), generator=make, dtype=torch.uint8
    )
    scales = torch.randn(outputs, columns // block, generator=make) * 0.01
    given = {"x_scale": torch.tensor([0.03]), "packed": packed, "scales": scales}
    if kept is not None:
        least = -7 * scales.abs() + 0.02 * torch.randn(scales.shape, generator=make)
        given |= {"scales": scales.abs().to(kept), "minimums": least.to(kept)}
    # one scale for all outputs, and one for each
    scales_of_y = {
        f"{name}_scale": torch.rand(count, generator=make) * 0.05 + 0.05
        for name, count in (("whole", 1), ("each", outputs))
    }
    bench = Workbench(regime, T=steps, B=batch, L=0)
    bench.value("x", x, stride=columns + 16, start=start)
    for name, array in {**given, **scales_of_y}.items():
        bench.constant(name, array)
    inputs, op = ("x", *given), f"LinearInt4{'Minimum' if kept else ''}"
    sizes = {"K": columns, "N": outputs, "bits": 4, "block_size": block}
    bench.lower(LOWER, op, inputs, ("y",), **sizes)
    for name in scales_of_y:
        bench.lower(LOWER, f"{op}Quantize", (*inputs, name), (f"by_{name}",), **sizes)
    bench.run()
    exact = reference.linear_int4_minimum if kept else reference.linear_int4
    expected = exact(x, **given)
    near = 1e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(bench.read("y"), expected, rtol=1e-5, atol=near)
    for name, y_scale in scales_of_y.items():
        rounded = reference.quantize(expected, y_scale)
        assert_steps(bench.read(f"by_{name}"), rounded)
        assert len(rounded.unique()) > 3
