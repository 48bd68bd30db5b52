"""Rotation and append in one launch, against the references: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge import launch
from edge.errors import ExportError
from edge.plugins.lowering.context import Node
from edge.plugins.lowering.rope import LOWER, append
from edge.plugins.reference.attention import rope_tables
from tests.kernels.rowwise import CHAIN, MANY, Workbench, poisoned

# (T, B, heads, kv heads, head_dim, rotated values)
SHAPES = [
    (1, 1, 1, 1, 8, 8), (5, 3, 4, 2, 24, 16), (17, 1, 12, 3, 40, 40), (2, 2, 30, 30, 128, 64),
]  # fmt: skip
PAST, CAPACITY = 6, 29


def _bench(steps: int, batch: int, widths: dict[str, int]) -> tuple[Workbench, dict[str, Tensor]]:
    """q, k and v are parts of one product."""
    make = torch.Generator().manual_seed(steps)
    bench = Workbench(CHAIN if steps * batch <= 16 else MANY, T=steps, B=batch, C=CAPACITY)
    stride, start, parts = sum(widths.values()) + 4, 4, {}
    for name, width in widths.items():
        parts[name] = torch.randn(steps * batch, width, generator=make)
        bench.value(name, parts[name], stride=stride, start=start)
        start += width
    run = torch.zeros(8, dtype=torch.int32)
    run[launch.PAST] = PAST
    bench.given("input", "run", run)
    return bench, parts


def _heads(x: Tensor, steps: int, batch: int, p: int) -> Tensor:
    """[T·B, heads·P] → [B, heads, T, P]."""
    return x.view(steps, batch, -1, p).permute(1, 2, 0, 3)


def _appended(caches: Tensor, new: Tensor) -> Tensor:
    caches = caches.clone()
    caches[:, :, PAST : PAST + new.shape[2]] = new
    return caches


def _node(heads: int, kv: int, p: int, q: str, k: str) -> Node:
    attributes = {"heads": heads, "kv_heads": kv, "head_dim": p, "scale": 1.0}
    return Node("Attention", "a", (q, k, "v", "kc", "vc"), ("y", "", ""), attributes)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("steps", "batch", "heads", "kv", "p", "dim"), SHAPES)
def test_rotate_and_append(
    steps: int, batch: int, heads: int, kv: int, p: int, dim: int, rotated: bool
) -> None:
    bench, parts = _bench(steps, batch, {"q": heads * p, "k": kv * p, "v": kv * p})
    shape = (batch, kv, CAPACITY, p)
    empty = poisoned(batch * kv * CAPACITY * p, torch.float32).view(shape)
    bench.given("cache", "kc", empty)
    bench.given("cache", "vc", empty)
    angle = torch.randn(steps, dim // 2, generator=torch.Generator().manual_seed(3)) * 9
    cos, sin = angle.cos(), angle.sin()
    if rotated:
        bench.given("input", "rope0.cos", cos)
        bench.given("input", "rope0.sin", sin)
        for name in ("q", "k"):
            inputs = (name, "rope0.cos", "rope0.sin")
            bench.lower(LOWER, "Rope", inputs, (f"{name}.turned",), head_dim=p, dim=dim)
        assert not bench.lowering.order
    end = ".turned" if rotated else ""
    q = append(bench.lowering, _node(heads, kv, p, f"q{end}", f"k{end}"))
    assert len(bench.lowering.order) == 1
    bench.run()
    split = {name: _heads(x, steps, batch, p) for name, x in parts.items()}
    if rotated:
        split |= {name: rope_tables(split[name], cos, sin) for name in ("q", "k")}
    bench.lowering.views["found"] = q
    assert torch.equal(_heads(bench.read("found"), steps, batch, p), split["q"])
    for name, cache in (("k", "kc"), ("v", "vc")):
        expected = _appended(empty, split[name])
        found = bench.whole("cache", cache, shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_keys_that_are_not_rotated_as_queries_are_refused() -> None:
    bench, _ = _bench(1, 1, {"q": 8, "k": 8, "v": 8})
    bench.lower(LOWER, "Rope", ("q", "cos", "sin"), ("q.turned",), head_dim=8, dim=8)
    with pytest.raises(ExportError, match="not rotated alike"):
        append(bench.lowering, _node(1, 1, 8, "q.turned", "k"))
