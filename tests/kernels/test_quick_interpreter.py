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


@triton.jit
def everything(x, i, n, out, whole, BY: tl.constexpr, N: tl.constexpr):
    """Do all that tests/quick_operations.py replaces: out and whole [12, N, 2·N], x [N, 2·N]."""
    rows, columns = tl.arange(0, N), tl.arange(0, 2 * N)
    at = rows[:, None] * (2 * N) + columns[None, :]
    inside = (rows[:, None] < n) & (columns[None, :] >= 1)
    some = tl.load(x + columns, mask=columns < n, other=0)
    a, b = tl.load(x + at, mask=inside, other=0), some[None, :]
    every = N * 2 * N
    tl.store(out + at, a + b, mask=inside)
    tl.store(out + every + at, a - BY)
    tl.store(out + 2 * every + at, (BY - a) * (2 + b))
    tl.store(out + 3 * every + at, a * b * 0.5)
    tl.store(out + 4 * every + at, a / (b + 3) + 2.5 / (b + 3))
    tl.store(out + 5 * every + at, tl.where(a < b, a, b) + tl.where(inside, a, 0.0))
    tl.store(out + 6 * every + at, tl.where((a <= 0) | (b > 1), 1.0, tl.exp(a)))
    tl.store(out + 7 * every + at, tl.maximum(a, b) + tl.minimum(0.25, a) + tl.exp2(b))
    tl.store(out + 8 * every + at, (tl.sum(a, 1)[:, None] + b) * tl.sum(tl.sum(a, 0), 0))
    tl.store(
        out + 9 * every + at, a.to(tl.float16).to(tl.float32) + (a * 7).to(tl.int8).to(tl.float32)
    )
    tl.store(out + 10 * every + at, (a == b).to(tl.float32) + (a != a).to(tl.float32))
    f = tl.where(a < 9, a, 1.0)
    products = tl.dot(f, tl.trans(f), tl.full([N, N], 0.5, tl.float32))
    products = tl.dot(f, tl.trans(f), products)  # checked before
    halves = tl.dot(f.to(tl.float16), tl.trans(f.to(tl.float16)), products)
    row = tl.load(x + columns, mask=columns < n, other=1.5)[None, :]
    fused = tl.fma(tl.sum(halves, 1)[:, None], tl.broadcast_to(row, a.shape), tl.fma(f, 2.0, row))
    tl.store(out + 11 * every + at, fused)
    j = tl.load(i + at)
    k = tl.load(i + rows)[:, None]
    wide = j.to(tl.int64) * k
    tl.store(whole + at, j + k, mask=j >= 0)
    tl.store(whole + every + at, (j - k) * 3)
    tl.store(whole + 2 * every + at, j // 7 + j // k)
    tl.store(whole + 3 * every + at, j % 7 + j % k)
    tl.store(whole + 4 * every + at, tl.minimum(j, 3) + tl.maximum(n, k))
    tl.store(whole + 5 * every + at, (j & 5) | k)
    tl.store(whole + 6 * every + at, (wide + 1).to(tl.int32))
    tl.store(whole + 7 * every + at, tl.sum(j, 0)[None, :] + (j > k).to(tl.int32))
    tl.store(whole + 8 * every + at, tl.load(i + tl.minimum(n, 2) + rows)[:, None] + n)
    tl.store(whole + 9 * every, tl.load(i + n))
    words = f.to(tl.int32, bitcast=True)
    halfwords = tl.load(i.to(tl.pointer_type(tl.int16), bitcast=True) + 2 * at)
    small = (halfwords.to(tl.uint8) >> 2) ^ 5
    tl.store(whole + 10 * every + at, ((j << 3) >> 1) ^ (words >> 20) | (small << 1).to(tl.int32))
    codes = small.to(tl.int8, bitcast=True)
    sums = tl.dot(codes, tl.trans(codes), tl.zeros([N, N], tl.int32), out_dtype=tl.int32)
    sums = tl.dot(codes, tl.trans(codes), sums, out_dtype=tl.int32)
    mixed = (j + wide) * 2 + (wide > j).to(tl.int32)
    tl.store(whole + 11 * every + at, mixed.to(tl.int32) + tl.sum(sums, 1)[:, None])


def test_every_operation_has_the_bits_of_tritons() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 16, generator=generator)
    x[2, 3], x[5, 1] = torch.nan, torch.inf
    i = torch.randint(-9, 9, (8, 16), dtype=torch.int32, generator=generator)
    i[i == 0] = 1

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, whole = torch.zeros(12, 8, 16), torch.zeros(12, 8, 16, dtype=torch.int32)
        with np.errstate(all="ignore"):
            everything[(1,)](x, i, 5, out, whole, 0.75, 8)
        return out, whole

    with as_it_comes():
        expected = run()
    for found, other in zip(run(), expected, strict=True):
        assert found.numpy().tobytes() == other.numpy().tobytes()
    assert (expected[0] != 0).any(-1).any(-1).sum() == 12
    assert (expected[1] != 0).any(-1).any(-1).sum() == 12


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
    logits = made.cuda.run(tokens(2, seed=1), state, parents=[-1, -1], rows="all").copy()
    state.select(1)
    return {"logits": logits, **state.arrays()}
