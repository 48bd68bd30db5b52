"""The largest logits of each row and their tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge.errors import ExportError
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, Workbench


def _bench(logits: Tensor) -> Workbench:
    bench = Workbench(CHAIN, T=16, L=len(logits))
    bench.value("logits", logits, stride=logits.shape[1] + 3)
    return bench


def _greedy(logits: Tensor) -> list[int]:
    bench = _bench(logits)
    bench.lower(LOWER, "Greedy", ("logits",), {"picked": "ids"})
    bench.run()
    return [int(token) for token in bench.read("ids")[:, 0]]


def _best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    bench = _bench(logits)
    bench.lower(LOWER, "Best", ("logits",), {"values": "values", "picked": "ids"}, k=k)
    bench.run()
    return bench.read("values"), bench.read("ids").long()


def _expected(logits: Tensor, k: int) -> Tensor:
    """A stable sort keeps the lowest token first among equals."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


# the interpreter sorts slowly: many tokens of a small vocabulary, few of one with several blocks
@pytest.mark.parametrize(("size", "k"), [(100, 64), (64, 64), (100, 40), (100, 1), (2100, 3)])
def test_they_are_in_order_and_the_lowest_token_is_first_among_equals(size: int, k: int) -> None:
    make = torch.Generator().manual_seed(size)
    # few distinct values of both signs, so there are many ties
    logits = torch.randint(-6, 4, (2, size), generator=make).float() / 7
    logits[1] = torch.randn(size, generator=make)
    values, ids = _best(logits, k)
    assert torch.equal(ids, _expected(logits, k))
    assert torch.equal(values, logits.gather(-1, ids))


@pytest.mark.parametrize("size", [100, 2048, 50280])
def test_the_largest(size: int) -> None:
    make = torch.Generator().manual_seed(size)
    logits = torch.randint(-6, 4, (2, size), generator=make).float() / 7
    logits[1] = torch.randn(size, generator=make)
    assert _greedy(logits) == [int(token) for token in _expected(logits, 1)]


@pytest.mark.parametrize("size", [100, 5001])
def test_the_ends_and_the_infinities(size: int) -> None:
    logits = torch.full((5, size), -float("inf"))
    logits[1, -1] = -3e38
    logits[2, 50] = float("inf")
    logits[3, [7, 9]] = torch.tensor([-0.0, 0.0])
    logits[4] = -1.5
    assert _greedy(logits) == [0, size - 1, 50, 7, 0]


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
def test_a_nan_is_never_a_token(nan: float) -> None:
    logits = torch.zeros(3, 2100)
    logits[0, 3], logits[1, 2099], logits[2, 8] = float("inf"), nan, 1
    assert _greedy(logits) == [3, -1, 8]
    values, ids = _best(logits, 2)
    assert ids[1].tolist() == [-1] * 2 and bool(values[1, 0].isnan())
    assert torch.equal(ids[[0, 2]], _expected(logits[[0, 2]], 2))


def test_more_than_there_are_cannot_be_picked() -> None:
    for k in (0, 65, 101):
        with pytest.raises(ExportError, match="of 100 tokens"):
            _best(torch.zeros(1, 100), k)
