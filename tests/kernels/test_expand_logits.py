"""Logits of few ids in the places of all: the kernel and the body against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.plugins.expand_logits.reference import expand_logits
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import MANY, Workbench


def places(few: int, all_ids: int) -> Tensor:
    """Columns of `few` ids spread over all, the first and the last among them."""
    index = torch.full((all_ids,), -1, dtype=torch.int32)
    index[torch.linspace(0, all_ids - 1, few).long()] = torch.arange(few, dtype=torch.int32)
    return index


@pytest.mark.parametrize(
    ("few", "all_ids", "steps", "batch"),
    [(1, 3, 1, 1), (5, 5, 2, 1), (40, 1031, 3, 2), (2049, 5000, 2, 1)],
)
def test_the_kernel_is_the_reference(few: int, all_ids: int, steps: int, batch: int) -> None:
    make = torch.Generator().manual_seed(few)
    x, index = torch.randn(steps * batch, few, generator=make), places(few, all_ids)
    bench = Workbench(MANY, T=steps, B=batch)
    bench.value("x", x, stride=few + 5, start=3)
    bench.constant("index", index)
    bench.lower(LOWER, "ExpandLogits", ("x", "index"), ("y",))
    bench.run()
    found = bench.read("y")
    assert torch.equal(found, expand_logits(x, index))
    assert torch.equal(found[:, index >= 0], x)
    assert (found[:, index < 0] == x.amin(1, keepdim=True)).all()


def test_columns_that_do_not_exist_read_nothing() -> None:
    """A hostile bundle may hold any index."""
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    bench = Workbench(MANY, T=2, B=1)
    bench.value("x", x)
    bench.constant("index", torch.tensor([0, 5, -7, 2**31 - 1, -(2**31), 4], dtype=torch.int32))
    bench.lower(LOWER, "ExpandLogits", ("x", "index"), ("y",))
    bench.run()
    least = x.amin(1)
    assert torch.equal(bench.read("y"), torch.stack([x[:, 0], *[least] * 4, x[:, 4]], 1))


RACES = (lambda: test_the_kernel_is_the_reference(40, 1031, 3, 2),)
