"""The convolution as a kernel: windows over state, logs and new tokens; its state; its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.plugins.causal_conv1d import reference as causal_conv1d
from edge.plugins.lowering.lowerings import LOWER
from tests.int8_recurrent import Compared, conv_feeds, conv_outputs, scale
from tests.kernels.recurrent_inputs import (
    ADVANCED,
    LAST,
    Logs,
    Run,
    same_bits,
    two_slots,
)

Feeds = dict[str, Any]
STATE, LOG = "layers.0.conv_state", "layers.0.conv_in"
SCALED = ("x", "x_scale", "weight", "weight_scale", "bias", "bias_scale", "y_scale")
kinds = pytest.mark.parametrize("kind", ["float", "one scale", "many scales"])


@dataclass
class Result:
    """y [T, B, C]; states [2, K-1, B, C]."""

    y: Tensor
    states: Tensor


def feeds_of(kind: str, tokens: int, batch: int, width: int, c: int = 144) -> Feeds:
    rng = np.random.default_rng(tokens * 10 + batch)
    if kind != "float":
        return conv_feeds(rng, tokens, batch, width, kind == "many scales", c)
    shapes = {
        "x": (tokens, batch, c), "conv_state": (width - 1, batch, c),
        "weight": (width, 1, c), "bias": (c,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def run_conv(feeds: Feeds, run: Run, op: str = "CausalConv1d") -> Result:
    """Run the lowering; check the log and the slot it starts from."""
    _, batch, channels = feeds["x"].shape
    width = feeds["weight"].shape[0]
    bench, logs, new = run.bench(batch), Logs(run, batch), list(run.new)
    rows = torch.from_numpy(feeds["x"])[new].reshape(-1, channels)
    bench.value("x", rows, 2 * channels)  # the first half of xz
    for name, value in zip(("taps", "state_taps"), run.taps(width), strict=True):
        bench.given("input", f"{name}{width}", value)
    before = two_slots(torch.from_numpy(feeds["conv_state"]), run.source)
    bench.given("state", STATE, before)
    logs.fill(bench, LOG, torch.from_numpy(feeds["x"]))
    weights = [name for name in feeds if name not in ("x", "conv_state")]
    for name in weights:
        bench.constant(name, torch.from_numpy(feeds[name]))
    if "x_scale" in feeds:
        inputs = ["x", "x_scale", STATE, "taps", "kept_taps", *SCALED[2:]]
        bench.lower(LOWER, "CausalConv1dInt8", tuple(inputs), ("y", "states"))
    else:
        inputs = ["x", STATE, "taps", "kept_taps", "weight", "bias"]
        bench.lower(LOWER, op, tuple(inputs), ("y", "states"))
    bench.run()
    logs.check(bench, LOG, torch.from_numpy(feeds["x"]))
    states = bench.whole("state", STATE, tuple(before.shape))
    assert same_bits(states[run.source], before[run.source])
    if not run.store:
        assert same_bits(states, before)
    y = bench.read("y").view(len(new), batch, channels) if new else torch.zeros(0)
    return Result(y, states)


def expected(feeds: Feeds, path: list[int]) -> tuple[Tensor, Tensor]:
    """Return y [T, B, C] of the tokens of the path, and the state after the last."""
    if "x_scale" in feeds:
        y, after = conv_outputs(feeds, path)
        return torch.from_numpy(y), torch.from_numpy(np.ascontiguousarray(after))
    x, state = (
        torch.from_numpy(v).transpose(0, 1) for v in (feeds["x"][path], feeds["conv_state"])
    )
    weight, bias = torch.from_numpy(feeds["weight"][:, 0].T), torch.from_numpy(feeds["bias"])
    found, after = causal_conv1d.causal_conv1d(x, state, weight, bias)
    return found.transpose(0, 1), after.transpose(0, 1).contiguous()


def check(feeds: Feeds, run: Run) -> Result:
    found, compared = run_conv(feeds, run), Compared()
    outputs = run.outputs(lambda path: expected(feeds, path)[0])
    for y, wanted in zip(found.y, outputs, strict=True):
        if wanted.dtype == torch.int8:
            compared.int8(y.numpy(), wanted.numpy())
        else:
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    if run.store:
        path = [*run.pending, *run.new] if run.store == LAST else run.pending[: run.advance]
        _, after = expected(feeds, [*path])
        assert same_bits(found.states[1 - run.source], after)
    compared.check()
    return found


@kinds
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("pending", "new", "batch"), [(0, 1, 1), (1, 2, 3), (5, 7, 2), (2, 17, 1), (3, 63, 2)]
)
def test_chains(kind: str, width: int, pending: int, new: int, batch: int) -> None:
    feeds = feeds_of(kind, pending + new, batch, width)
    check(feeds, Run(range(pending), range(pending, pending + new), store=LAST, source=new % 2))


@pytest.mark.parametrize(("new", "batch"), [(1, 1), (19, 2)])
def test_without_silu(new: int, batch: int) -> None:
    feeds = feeds_of("float", 5 + new, batch, 3)
    run = Run(range(5), range(5, 5 + new), store=LAST)
    found = run_conv(feeds, run, "CausalConvPlain")
    weight, bias = torch.from_numpy(feeds["weight"][:, 0].T), torch.from_numpy(feeds["bias"])
    x, state = (torch.from_numpy(feeds[name]).transpose(0, 1) for name in ("x", "conv_state"))
    y, after = causal_conv1d.causal_conv_plain(x, state, weight, bias)
    torch.testing.assert_close(found.y, y[:, 5:].transpose(0, 1), rtol=1e-5, atol=1e-6)
    assert same_bits(found.states[1 - run.source], after.transpose(0, 1).contiguous())


@kinds
@pytest.mark.parametrize("batch", [1, 3])
def test_trees(kind: str, batch: int) -> None:
    """Every token's window follows its own path."""
    feeds = feeds_of(kind, 8, batch, 4)
    parents = [-1, 0, 0, 1, -1]
    found = check(feeds, Run(range(3), range(3, 8), parents=parents))
    run = Run(range(3), range(3, 8))
    chain = run_conv(feeds, run)
    as_tree = run_conv(feeds, Run(range(3), range(3, 8), parents=[-1, 0, 1, 2, 3]))
    assert same_bits(as_tree.y, chain.y) and not same_bits(found.y, chain.y)


@kinds
@pytest.mark.parametrize("advance", [1, 2, 4])
@pytest.mark.parametrize("new", [0, 1, 20])
def test_advances_by_any_number_of_pending_tokens(kind: str, advance: int, new: int) -> None:
    feeds = feeds_of(kind, 4 + new, 2, 4)
    check(feeds, Run(range(4), range(4, 4 + new), advance, ADVANCED, source=1))


@kinds
def test_nothing_new_advances_the_state(kind: str) -> None:
    """T = 0, with a batch whose state has more rows than one program takes at once."""
    feeds = feeds_of(kind, 2, 7, 4)
    check(feeds, Run(range(2), (), store=LAST))
    settled = run_conv(feeds, Run((), (), store=LAST))
    assert same_bits(settled.states[1], torch.from_numpy(feeds["conv_state"]))


@kinds
def test_a_chain_is_its_single_steps(kind: str) -> None:
    feeds = feeds_of(kind, 20, 2, 4)
    together = run_conv(feeds, Run((), range(20), store=LAST))
    for pending in (0, 1, 3, 19):
        one = run_conv(feeds, Run(range(pending), [pending], store=LAST))
        assert same_bits(one.y[0], together.y[pending])
    assert same_bits(one.states[1], together.states[1])


@kinds
def test_sequences_do_not_know_of_each_other(kind: str) -> None:
    feeds = feeds_of(kind, 6, 3, 4)
    run = Run(range(2), range(2, 6), store=LAST)
    all_three = run_conv(feeds, run)
    for b in range(3):
        alone = {
            name: value[:, b : b + 1] if name in ("x", "conv_state") else value
            for name, value in feeds.items()
        }
        one = run_conv(alone, run)
        assert same_bits(one.y[:, 0], all_three.y[:, b])
        assert same_bits(one.states[1, :, 0], all_three.states[1, :, b])


def test_saturates_and_rounds_half_to_even() -> None:
    """With one tap of weight 1 and huge inputs silu(v) is v, so the steps are known exactly."""
    q = np.array([3, -1, 0, 1, 25, 26, 27, 100, 127], np.int8)
    feeds = {
        "x": q[None, None], "x_scale": np.array([64], np.float32),
        "conv_state": np.zeros((1, 1, 9), np.int8),
        "weight": np.array([[[0] * 9], [[1] * 9]], np.int8), "weight_scale": scale(127),
        "bias": np.zeros(9, np.int8), "bias_scale": scale(1),
        "y_scale": np.array([128], np.float32),
    }  # fmt: skip
    run = Run((), [0])
    assert run_conv(feeds, run).y[0, 0].tolist() == [2, 0, 0, 0, 12, 13, 14, 50, 64]
    feeds["y_scale"] = np.array([0.5], np.float32)
    assert run_conv(feeds, run).y[0, 0].tolist() == [127, 0, 0, 127, 127, 127, 127, 127, 127]
