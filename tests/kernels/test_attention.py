"""Attention over caches as kernels, against the reference: steps, trees, long chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from edge import launch
from edge.errors import ExportError
from edge.plugins.attention.reference import attention, rope_tables
from edge.plugins.lowering.context import Regime
from edge.plugins.lowering.lowerings import LOWER
from tests.kernels.rowwise import CHAIN, MANY, TREE, Workbench, poisoned
from tests.on_device import same_sums

ONE = Regime("chain", 1)


class Case:
    """One Attention node with random inputs; caches hold `past` slots, and NaN beyond."""

    def __init__(
        self, regime: Regime, steps: int, batch: int, heads: int, kv: int, p: int, past: int,
        *, capacity: int = 0, spread: float = 1.0, dim: int = 0, half: bool = False,
        window: int = 0, softcap: float = 0.0,
    ) -> None:  # fmt: skip
        make = torch.Generator().manual_seed(steps * 1000 + past)
        self.steps, self.batch, self.heads, self.kv, self.p = steps, batch, heads, kv, p
        self.past, self.scale, self.dim = past, 0.3, dim
        self.window, self.softcap = window, softcap
        self.shape = (batch, kv, capacity or past + steps + 5, p)
        self.bench = Workbench(regime, T=steps, B=batch, C=self.shape[2])
        stride, start, self.parts = (heads + 2 * kv) * p + 8, 8, {}
        for name, count in (("q", heads), ("k", kv), ("v", kv)):
            x = torch.randn(steps * batch, count * p, generator=make) * spread
            self.bench.value(name, x, stride=stride, start=start)
            self.parts[name] = x.view(steps, batch, count, p).permute(1, 2, 0, 3)
            start += count * p
        self.caches = {}
        for name in ("keys", "values"):
            kept = torch.float16 if half else torch.float32
            cache = poisoned(batch * kv * self.shape[2] * p, kept).view(self.shape)
            cache[:, :, :past] = torch.randn(batch, kv, past, p, generator=make) * spread
            self.caches[name] = cache
            self.bench.given("cache", name, cache)
        run = torch.full((8,), 1 << 30, dtype=torch.int32)  # other fields are not read
        run[launch.PAST] = past
        self.bench.given("input", "run", run)
        self.angles = torch.randn(steps, dim // 2, generator=make) * 9

    def run(self, ancestors: Tensor | None = None) -> Tensor:
        """Lower and run; return y [B, heads, T, P]. Caches must then hold only k and v."""
        if ancestors is not None:
            self.bench.given("input", "ancestors", ancestors.to(torch.int32))
        inputs = {name: name for name in ("q", "k", "v")}
        inputs |= {"key_cache": "keys", "value_cache": "values"}
        rotation = {"dim": self.dim} if self.dim else {}
        kind = "AttentionF16" if self.caches["keys"].itemsize == 2 else "Attention"
        if self.dim:
            self.bench.given("input", "cos", self.angles.cos())
            self.bench.given("input", "sin", self.angles.sin())
            inputs |= {"cos": "cos", "sin": "sin"}
        self.bench.lower(
            LOWER, f"Rotary{kind}" if self.dim else kind, inputs, {"y": "y"},
            heads=self.heads, kv_heads=self.kv, head_dim=self.p, scale=self.scale,
            window=self.window, softcap=self.softcap, **rotation,
        )  # fmt: skip
        self.bench.run()
        for name, cache in self._written().items():
            found = self.bench.whole("cache", name, self.shape)
            torch.testing.assert_close(found, cache, rtol=0, atol=0, equal_nan=True)
        y = self.bench.read("y").view(self.steps, self.batch, self.heads, self.p)
        return y.permute(1, 2, 0, 3)

    def _turned(self, name: str) -> Tensor:
        x = self.parts[name]
        return rope_tables(x, self.angles.cos(), self.angles.sin()) if self.dim else x

    def _written(self) -> dict[str, Tensor]:
        written = {}
        for name, new in (("keys", self._turned("k")), ("values", self.parts["v"])):
            written[name] = self.caches[name].clone()
            written[name][:, :, self.past : self.past + self.steps] = new
        return written

    def expected(self, ancestors: Tensor | None = None) -> Tensor:
        """Compute the reference in fp64."""
        end = self.past + self.steps
        keys, values = (cache[:, :, :end].double() for cache in self._written().values())
        past = torch.ones(self.steps, self.past, dtype=torch.bool)
        own = torch.ones(self.steps, self.steps).tril() if ancestors is None else ancestors
        mask = torch.cat([past, own.bool()], 1)
        if self.window:  # the last slots that each token would see
            mask &= mask.flip(1).cumsum(1).flip(1) <= self.window
        q = self._turned("q").double()
        return attention(q, keys, values, mask, self.scale, self.softcap).float()


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# (T, B, heads, kv heads, head_dim, past): several splits, partial tiles, padded heads
STEPS = [
    (1, 1, 4, 2, 64, 0), (1, 1, 2, 2, 40, 700), (2, 1, 4, 1, 64, 63), (5, 3, 3, 1, 24, 130),
    (16, 1, 3, 1, 128, 31), (7, 2, 2, 2, 8, 1), (1, 3, 8, 2, 16, 250), (3, 1, 2, 1, 160, 40),
]  # fmt: skip


@pytest.mark.parametrize(("steps", "batch", "heads", "kv", "p", "past"), STEPS)
def test_steps(steps: int, batch: int, heads: int, kv: int, p: int, past: int) -> None:
    case = Case(CHAIN, steps, batch, heads, kv, p, past)
    _close(case.run(), case.expected())
    assert len(case.bench.lowering.order) == 3


@pytest.mark.parametrize(
    ("heads", "kv", "p", "past"),
    [(4, 4, 64, 0), (2, 2, 128, 300), (5, 5, 40, 63), (8, 2, 64, 64), (1, 1, 8, 4500)],
)
def test_one_token(heads: int, kv: int, p: int, past: int) -> None:
    """Without GQA one token is one row, which takes a separate path."""
    case = Case(ONE, 1, 1, heads, kv, p, past)
    _close(case.run(), case.expected())


def _tree(steps: int) -> Tensor:
    """Token t follows t-2 (t-1 for the second): two branches from the first token."""
    ancestors = torch.eye(steps, dtype=torch.int32)
    for t in range(1, steps):
        ancestors[t] |= ancestors[max(t - 2, 0)]
    return ancestors


@pytest.mark.parametrize(("steps", "batch", "heads", "kv", "p", "past"), STEPS)
def test_trees(steps: int, batch: int, heads: int, kv: int, p: int, past: int) -> None:
    case, ancestors = Case(TREE, steps, batch, heads, kv, p, past), _tree(steps)
    _close(case.run(ancestors), case.expected(ancestors))


def test_a_chain_is_a_tree_of_one_branch() -> None:
    chain, tree = (Case(regime, 6, 2, 2, 1, 32, 90) for regime in (CHAIN, TREE))
    assert same_sums(tree.run(torch.ones(6, 6).tril()), chain.run())


@pytest.mark.parametrize(
    ("steps", "batch", "heads", "kv", "p", "past"),
    [
        (17, 1, 4, 2, 64, 0), (63, 2, 6, 2, 40, 0), (63, 1, 2, 2, 128, 45), (40, 3, 3, 1, 8, 77),
        (130, 1, 5, 1, 16, 3), (1, 1, 2, 2, 160, 30),
    ],
)  # fmt: skip
def test_long_chunks(steps: int, batch: int, heads: int, kv: int, p: int, past: int) -> None:
    case = Case(MANY, steps, batch, heads, kv, p, past)
    _close(case.run(), case.expected())
    assert len(case.bench.lowering.order) == 2


@pytest.mark.parametrize("regime", [CHAIN, TREE, MANY])
def test_rotated(regime: Regime) -> None:
    case = Case(regime, 9, 1, 2, 1, 24, 50, dim=16)
    ancestors = _tree(9) if regime.kind == "tree" else None
    _close(case.run(ancestors), case.expected(ancestors))


@pytest.mark.parametrize("regime", [ONE, CHAIN, TREE, MANY])
def test_scores_that_would_overflow_exp(regime: Regime) -> None:
    """Scores of ±1000: one exp would be inf, and a sum of far smaller ones 0."""
    case = Case(regime, 1, 1, 2, 2, 32, 200, spread=20.0)
    ancestors = torch.ones(1, 1) if regime.kind == "tree" else None
    y = case.run(ancestors)
    torch.testing.assert_close(y, case.expected(ancestors), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("regime", [ONE, CHAIN, TREE, MANY])
def test_fp16_caches(regime: Regime) -> None:
    """Keys, rotated or not, and values are rounded once, and read back as stored."""
    steps, dim = (1, 0) if regime is ONE else (9, 16)
    case = Case(regime, steps, 1, 2, 2 if regime is ONE else 1, 40, 77, dim=dim, half=True)
    ancestors = _tree(steps) if regime.kind == "tree" else None
    _close(case.run(ancestors), case.expected(ancestors))


@pytest.mark.parametrize("regime", [ONE, CHAIN, TREE, MANY])
@pytest.mark.parametrize("window", [1, 3, 70])
def test_a_window(regime: Regime, window: int) -> None:
    """The window starts in the run, in the past, or, for the first tokens, before it."""
    steps, kv = (1, 2) if regime is ONE else (9, 1)
    for past in (0, 66, 150):
        case = Case(regime, steps, 1, 2, kv, 24, past, window=window)
        ancestors = _tree(steps) if regime.kind == "tree" else None
        _close(case.run(ancestors), case.expected(ancestors))


@pytest.mark.parametrize("regime", [ONE, CHAIN, TREE, MANY])
@pytest.mark.parametrize("softcap", [0.7, 50.0])
def test_soft_capped_scores(regime: Regime, softcap: float) -> None:
    """A cap that bends most scores, and one that few scores reach; with a window too."""
    steps, kv = (1, 2) if regime is ONE else (9, 1)
    for past, window in ((0, 0), (66, 0), (150, 70)):
        case = Case(regime, steps, 1, 2, kv, 24, past, window=window, softcap=softcap, spread=2.0)
        ancestors = _tree(steps) if regime.kind == "tree" else None
        _close(case.run(ancestors), case.expected(ancestors))


def test_the_grid_does_not_depend_on_the_past() -> None:
    short, long = (
        Case(CHAIN, 2, 1, 4, 2, 16, 3, capacity=64),
        Case(CHAIN, 2, 1, 4, 2, 16, 60, capacity=64),
    )
    for case in (short, long):
        case.run()
    assert short.bench.tables.launches == long.bench.tables.launches


def test_heads_that_do_not_fit_are_refused() -> None:
    case = Case(CHAIN, 1, 1, 3, 3, 8, 0)
    case.kv = 2
    with pytest.raises(ExportError, match="3 heads of 8 do not fit"):
        case.run()
