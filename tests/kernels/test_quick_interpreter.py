"""The tests' faster interpreter gives the results of Triton's own, and detects integer overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.cuda.models import Engines, engines, tokens
from tests.quick_interpreter import as_it_comes

pytestmark = pytest.mark.without_gpu


@triton.jit
def grow(x, y, TIMES: tl.constexpr, BY: tl.constexpr, N: tl.constexpr):
    """y [N] = (x · TIMES + BY) - BY."""
    at = tl.arange(0, N)
    tl.store(y + at, (tl.load(x + at) * TIMES + BY) - BY)


@pytest.mark.parametrize(
    ("dtype", "times", "by", "operation"),
    [
        (torch.int32, 2**30, 0, "mul"),
        (torch.int32, 1, 2**31 - 5, "add"),
        (torch.int32, 1, -(2**31), None),
        (torch.uint8, 1, 200, "add"),
        (torch.int64, 2**30, 2**40, None),
    ],
)
def test_integers_that_overflow(
    dtype: torch.dtype, times: int, by: int, operation: str | None
) -> None:
    x = torch.arange(64, dtype=dtype)
    y = torch.zeros_like(x)
    if operation is None:
        grow[(1,)](x, y, times, by, 64)
        assert torch.equal(y, x * times)
    else:
        with pytest.raises(InterpreterError, match=f"overflow in {operation}"):
            grow[(1,)](x, y, times, by, 64)


@pytest.mark.parametrize(("name", "quant"), [("all", "w8a8"), ("mamba2 groups", "fp16")])
def test_a_model_has_the_same_bits(name: str, quant: str) -> None:
    made = engines(name, quant)
    quick = _run(made)
    with as_it_comes():
        slow = _run(made)
    assert quick.keys() == slow.keys()
    for key, array in quick.items():
        np.testing.assert_array_equal(array, slow[key], err_msg=key)


def _run(made: Engines) -> dict[str, np.ndarray]:
    """Return the logits of a tree and the state after it."""
    state = made.cuda.new_state(window=3, capacity=16)
    logits = made.cuda.run(tokens(3, seed=1), state, parents=[-1, 0, 0], rows="all").copy()
    state.select(2)
    return {"logits": logits, **state.arrays()}
