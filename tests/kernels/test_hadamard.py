"""The Hadamard rotation as a kernel, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.errors import ExportError
from edge.plugins.hadamard.matrices import factors
from edge.plugins.hadamard.reference import hadamard
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.quantize.reference import quantize
from tests.kernels.rowwise import CHAIN, MANY, Workbench, assert_steps

# (n, T, B): p = 24, 80, 28, 8, 40; blocks of a power of two (n = 100, 2304); no rotation (15); two
SHAPES = [
    (1536, 1, 1), (5120, 1, 1), (1792, 17, 1), (512, 2, 3), (2560, 3, 1), (100, 7, 1),
    (2304, 1, 2), (15, 5, 2), (24, 63, 1), (1, 3, 1),
]  # fmt: skip


def _bench(n: int, steps: int, batch: int) -> tuple[Workbench, Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(n)
    x = torch.randn(steps * batch, n, generator=make) * 2
    bench = Workbench(CHAIN if steps * batch <= 16 else MANY, T=steps, B=batch)
    bench.value("x", x, stride=n + 4, start=2)
    slow, fast = (torch.tensor(part) for part in factors(n))
    bench.constant("slow", slow)
    bench.constant("fast", fast)
    return bench, x, slow, fast


@pytest.mark.parametrize(("n", "steps", "batch"), SHAPES)
def test_rotation(n: int, steps: int, batch: int) -> None:
    bench, x, slow, fast = _bench(n, steps, batch)
    bench.lower(LOWER, "Hadamard", ("x", "slow", "fast"), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), hadamard(x, slow, fast), rtol=1e-5, atol=2e-5)


def test_the_inverse_is_the_transpose() -> None:
    """H_20 and H_40 are not symmetric: a graph rotates back with slowᵀ."""
    bench, x, slow, _ = _bench(640, 2, 1)
    assert not torch.equal(slow, slow.T)
    bench.constant("back", slow.T.contiguous())
    bench.lower(LOWER, "Hadamard", ("x", "slow", "fast"), ("turned",))
    bench.lower(LOWER, "Hadamard", ("turned", "back", "fast"), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), x, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(("n", "steps", "batch"), SHAPES)
def test_rounded_rotation(n: int, steps: int, batch: int, one: bool) -> None:
    bench, x, slow, fast = _bench(n, steps, batch)
    make = torch.Generator().manual_seed(1)
    scale = torch.full((1,), 0.03) if one else torch.rand(n, generator=make) * 0.04 + 0.01
    bench.constant("scale", scale)
    bench.lower(LOWER, "HadamardQuantize", ("x", "slow", "fast", "scale"), ("y",))
    bench.run()
    assert_steps(bench.read("y"), quantize(hadamard(x, slow, fast), scale))


@pytest.mark.parametrize(("p", "q"), [(24, 64), (8, 16), (5, 48)])
@pytest.mark.parametrize("which", ["slow", "fast", "entry"])
def test_matrices_that_are_not_doubled(p: int, q: int, which: str) -> None:
    """A kernel may use additions for a matrix made by doubling. Any other matrix is multiplied as
    it is, even one that differs in a single element.
    """
    bench, x, slow, fast = _bench(p * q, 3, 1)
    if fast.shape[0] != q:
        slow, fast = torch.eye(p), torch.eye(q)
    make = torch.Generator().manual_seed(p)
    if which == "slow":
        slow = torch.linalg.qr(torch.randn(p, p, generator=make))[0].contiguous()
    elif which == "fast":
        fast = torch.linalg.qr(torch.randn(q, q, generator=make))[0].contiguous()
    else:
        fast = fast.clone()
        fast[-1, -2] *= -1
        fast[-1, 0] += 0.5
    bench.constant("slow", slow)
    bench.constant("fast", fast)
    bench.lower(LOWER, "Hadamard", ("x", "slow", "fast"), ("y",))
    bench.run()
    torch.testing.assert_close(bench.read("y"), hadamard(x, slow, fast), rtol=1e-5, atol=4e-5)


def test_factors_of_another_width_are_refused() -> None:
    bench, *_ = _bench(512, 1, 1)
    bench.constant("fast", torch.eye(32))
    with pytest.raises(ExportError, match="rotates 512 values by 8 x 32"):
        bench.lower(LOWER, "Hadamard", ("x", "slow", "fast"), ("y",))
