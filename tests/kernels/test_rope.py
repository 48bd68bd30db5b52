"""Rotation and append in one launch, against the references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge import launch
from edge.plugins.attention.lowering import append
from edge.plugins.attention.reference import rope_tables
from edge.plugins.lowering.context import Node
from edge.plugins.lowering.fuse import fuse
from edge.plugins.lowering.graph import bound
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, Workbench, poisoned

# (T, B, heads, kv heads, head_dim, rotated values)
SHAPES = [
    (1, 1, 1, 1, 8, 8), (5, 3, 4, 2, 24, 16), (17, 1, 12, 3, 40, 40), (2, 2, 30, 30, 128, 64),
]  # fmt: skip
PAST, CAPACITY = 6, 29


def _bench(steps: int, batch: int, widths: dict[str, int]) -> tuple[Workbench, dict[str, Tensor]]:
    """Set q, k and v as parts of one product."""
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


def _node(heads: int, kv: int, p: int, **rotation: int) -> Node:
    inputs = {name: name for name in ("q", "k", "v")} | {"key_cache": "kc", "value_cache": "vc"}
    if rotation:
        inputs |= {"cos": "rope0.cos", "sin": "rope0.sin"}
    attributes = {"heads": heads, "kv_heads": kv, "head_dim": p, "scale": 1.0, **rotation}
    return Node("RotaryAttention" if rotation else "Attention", "a", inputs, {"y": "y"}, attributes)


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
    node = _node(heads, kv, p, **({"dim": dim} if rotated else {}))
    q = append(bench.lowering, node)
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


def test_queries_and_keys_are_rotated_alike_or_not_at_all() -> None:
    """Otherwise the rotation stays a separate node, which no kernel runs."""

    def nodes(tables: str) -> list[Node]:
        attributes = {"heads": 1, "head_dim": 8, "dim": 8}
        ropes = [
            bound("Rope", name, (name, f"{of}.cos", f"{of}.sin"), (f"{name}.turned",), attributes)
            for name, of in (("q", "rope0"), ("k", tables))
        ]
        inputs = ("q.turned", "k.turned", "v", "kc", "vc")
        shape = {"heads": 1, "kv_heads": 1, "head_dim": 8, "scale": 1.0}
        return [*ropes, bound("Attention", "a", inputs, ("y",), shape)]

    (joined,) = fuse(nodes("rope0"), (), {}, known=LOWER, few=False)
    assert joined.op == "RotaryAttention" and joined.attributes["dim"] == 8
    assert joined.inputs["q"] == "q" and joined.inputs["cos"] == "rope0.cos"
    assert len(fuse(nodes("rope1"), (), {}, known=LOWER, few=False)) == 3
