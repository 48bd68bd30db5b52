"""Mamba-1's scan as a kernel: outputs, states, logs, and everything that must not change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.plugins.linear.reference import linear_int8_quantize
from edge.plugins.lowering.lowerings import LOWER
from edge.plugins.selective_scan import reference as selective_scan
from edge.plugins.selective_scan.statement import SELECTIVE_SCAN, SELECTIVE_SCAN_INT8
from tests.int8_recurrent import TOLERANCE, Compared, batch_first, int8, scale, scan_feeds, torched
from tests.kernels.recurrent_inputs import (
    ADVANCED,
    LAST,
    Logs,
    Run,
    same_bits,
    two_slots,
)
from tests.on_device import native, same_sums

Feeds = dict[str, Any]
STATE = "layers.3.ssm_state"
VALUES = ("x", "dt", "B", "C", "z")
LOGGED = ("x", "dt", "B")
# fp32 values, or int8 ones with a state of this many bits
KINDS = ["fp32", "32", "16", "8"]
kinds = pytest.mark.parametrize("kind", KINDS)
PARENTS = [-1, 0, 0, 2, -1, 1, 2]


@dataclass
class Result:
    """y [T, B, E]; states [2, B, N, E]."""

    y: Tensor
    states: Tensor


def feeds_of(
    kind: str,
    tokens: int,
    batch: int,
    a_channel: bool = False,
    e: int = 50,
    n: int = 16,
    groups: tuple[int, int] = (1, 1),
) -> Feeds:
    """Return feeds; `groups` of B and of C."""
    rng = np.random.default_rng(tokens * 10 + batch)
    if kind != "fp32":
        return scan_feeds(rng, tokens, batch, int(kind), a_channel, e, n, groups)
    feeds = {name: rng.standard_normal((tokens, batch, e)) for name in ("x", "dt", "z")}
    for name, count in zip("BC", groups, strict=True):
        feeds[name] = rng.standard_normal((tokens, batch, count * n))
    feeds |= {name: rng.standard_normal(e) for name in ("D", "dt_bias")}
    feeds["A"] = -np.exp(rng.standard_normal((n, e)))
    feeds["ssm_state"] = rng.standard_normal((batch, n, e)) * 3
    return {name: value.astype(np.float32) for name, value in feeds.items()}


def with_product(feeds: Feeds, rank: int, half: bool = False) -> Feeds:
    """Return the same feeds with the two factors of dt, for a fused product."""
    tokens, batch, channels = feeds["x"].shape
    rng = np.random.default_rng(rank)
    if "x_scale" not in feeds:
        low = rng.standard_normal((tokens, batch, rank)).astype(np.float32)
        weight = (rng.standard_normal((channels, rank)) / 8).astype(np.float16)
        if half:
            low[-1, 0, 0] = 1e6  # more than fp16 holds
            rounded = np.clip(low, -65504, 65504).astype(np.float16).astype(np.float64)
            dt = (rounded @ weight.T.astype(np.float64)).astype(np.float32)
        else:
            weight = weight.astype(np.float32)
            dt = (low.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)
        return feeds | {"dt": dt, "low_dt": low, "dt_weight": weight}
    many = feeds["dt_scale"].size > 1
    product = {
        "low_dt": int8(rng, tokens, batch, rank), "low_dt_scale": scale(3),
        "dt_weight": int8(rng, channels, rank),
        "dt_weight_scale": scale(1, rng, channels) if many else scale(1),
    }  # fmt: skip
    dt = linear_int8_quantize(*torched(*product.values(), feeds["dt_scale"]))
    return feeds | product | {"dt": dt.numpy()}


def run_scan(feeds: Feeds, run: Run) -> Result:
    """Run through the lowering; check the logs and the slot it starts from."""
    _, batch, channels = feeds["x"].shape
    rounded = "x_scale" in feeds
    op = SELECTIVE_SCAN_INT8 if rounded else SELECTIVE_SCAN
    bench, logs, new = run.bench(batch), Logs(run, batch), list(run.new)
    # B and C are columns of one product, z of another
    of_b, of_c = (feeds[name].shape[2] for name in "BC")
    wide = 48 + of_b + of_c
    places = {"B": (wide, 48), "C": (wide, 48 + of_b), "z": (2 * channels, channels)}
    product = [name for name in feeds if name.startswith(("low_dt", "dt_weight"))]
    for value in op.inputs:
        given = feeds.get(value.name)
        if value.name == "dt" and product:
            continue
        if value.name in VALUES:
            rows = torch.from_numpy(given[new].reshape(len(new) * batch, given.shape[2]))
            bench.value(value.name, rows, *places.get(value.name, ()))
        elif value.role == "weight":
            bench.constant(value.name, torch.from_numpy(given))
    for name in product:
        if name == "low_dt":  # the first columns of the product that holds B and C
            rows = torch.from_numpy(feeds[name][new].reshape(len(new) * batch, -1))
            bench.value(name, rows, rows.shape[1] + of_b + of_c)
        else:
            bench.constant(name, torch.from_numpy(feeds[name]))
    before = two_slots(torch.from_numpy(feeds["ssm_state"]), run.source)
    bench.given("state", STATE, before)
    for name in LOGGED:
        logs.fill(bench, f"layers.3.scan_{name}", torch.from_numpy(feeds[name]))
    attributes = {"state_bits": 8 * feeds["ssm_state"].itemsize} if rounded else {}
    names = [v.name for v in op.inputs if v.name != "dt" or not product]
    inputs = {name: name for name in (*names, *product)} | {"ssm_state": STATE}
    name = f"{op.name}Dt" if product else op.name
    bench.lower(LOWER, name, inputs, {"y": "y", "ssm_states": "states"}, **attributes)
    bench.run()
    for name in LOGGED:
        close = 2e-5 if name == "dt" and product and not rounded else 0.0
        logs.check(bench, f"layers.3.scan_{name}", torch.from_numpy(feeds[name]), close)
    states = bench.whole("state", STATE, tuple(before.shape))
    assert same_bits(states[run.source], before[run.source])
    if not run.store:
        assert same_bits(states, before)
    y = bench.read("y").view(len(new), batch, channels) if new else torch.zeros(0)
    return Result(y, states)


def expected(feeds: Feeds, path: list[int]) -> tuple[Tensor, Tensor]:
    """Return y [T, B, E] of the tokens of `path`, and the state after the last."""
    x, dt, B, C, z = batch_first(*(feeds[name][path] for name in VALUES))
    if "x_scale" not in feeds:
        A_log = torch.from_numpy(np.log(-feeds["A"])).T
        D, dt_bias, state = torched(feeds["D"], feeds["dt_bias"], feeds["ssm_state"])
        y, after = selective_scan.selective_scan(x, dt, A_log, B, C, D, dt_bias, z, state)
        return y.transpose(0, 1), after
    feeds = {n: v for n, v in feeds.items() if not n.startswith(("low_dt", "dt_weight"))}
    given = dict(zip(feeds, torched(*feeds.values()), strict=True))
    given |= {"x": x, "dt": dt, "B": B, "C": C, "z": z, "A_log": given["A_log"].T}
    y, after = selective_scan.selective_scan_int8(**given)
    return y.transpose(0, 1), after


def check(feeds: Feeds, run: Run) -> Result:
    """Compare every y and the stored state with the reference."""
    found, compared = run_scan(feeds, run), Compared()
    tolerance = TOLERANCE[8 * feeds["ssm_state"].itemsize]
    outputs = run.outputs(lambda path: expected(feeds, path)[0])
    for y, wanted in zip(found.y, outputs, strict=True):
        compared.floats(y.numpy(), wanted.numpy(), tolerance)
    if run.store:
        path = [*run.pending, *run.new] if run.store == LAST else run.pending[: run.advance]
        _, after = expected(feeds, [*path])
        compared.state(found.states[1 - run.source].numpy(), after.numpy())
    compared.check()
    return found


@kinds
@pytest.mark.parametrize(
    ("pending", "new", "batch", "a_channel"),
    [(0, 1, 1, False), (3, 5, 2, True), (2, 17, 1, False), (1, 18, 1, True), (1, 3, 3, False)],
)
def test_chains(kind: str, pending: int, new: int, batch: int, a_channel: bool) -> None:
    feeds = feeds_of(kind, pending + new, batch, a_channel)
    check(feeds, Run(range(pending), range(pending, pending + new), store=LAST, source=new % 2))


@pytest.mark.parametrize(
    ("kind", "pending", "new", "batch", "programs", "store"),
    [
        ("fp32", 0, 64, 1, 2, LAST), ("32", 3, 130, 2, 8, LAST), ("fp32", 2, 101, 1, 99, ADVANCED),
        ("32", 1, 63, 1, 99, LAST),
    ],
)  # fmt: skip
def test_parts_of_a_prompt(
    kind: str, pending: int, new: int, batch: int, programs: int, store: int
) -> None:
    """Two, four or three parts give the same as token by token, up to the order of sums."""
    feeds = feeds_of(kind, pending + new, batch, True)
    run = Run(range(pending), range(pending, pending + new), pending - 1, store, programs=programs)
    found = run_scan(feeds, run)
    alone = run_scan(feeds, replace(run, programs=0))
    for mine, other in ((found.y, alone.y), (found.states, alone.states)):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not native():  # which never splits a prompt
        assert same_bits(found.y, alone.y) == (programs // batch < 2 or new < 64)
    compared = Compared()
    outputs = run.outputs(lambda path: expected(feeds, path)[0])
    for y, wanted in zip(found.y, outputs, strict=True):
        compared.floats(y.numpy(), wanted.numpy(), TOLERANCE[32])
    if store == LAST:
        _, after = expected(feeds, [*run.pending, *run.new])
        compared.state(found.states[1 - run.source].numpy(), after.numpy())
    compared.check()


@kinds
@pytest.mark.parametrize(("e", "n"), [(45, 3), (150, 16), (33, 128), (1044, 16)])
def test_other_widths(kind: str, e: int, n: int) -> None:
    """Widths that are not multiples of a block, with more and fewer states than usual, and more
    than the caches are for.
    """
    feeds = feeds_of(kind, 5, 2, True, e, n)
    run = Run(range(2), range(2, 5), 1, ADVANCED)
    check(feeds, run)


# 1040 and 1056 channels are whole cache lines, 1048 half ones, 1044 neither
@pytest.mark.parametrize("e", [1040, 1044, 1048, 1056])
@pytest.mark.parametrize(("pending", "new", "batch"), [(0, 1, 1), (0, 1, 3), (1, 2, 1)])
def test_large_states_pass_the_caches(e: int, pending: int, new: int, batch: int) -> None:
    feeds = feeds_of("fp32", pending + new, batch, e=e)
    check(feeds, Run(range(pending), range(pending, pending + new), store=LAST))


@kinds
@pytest.mark.parametrize(
    ("e", "n", "groups", "new"), [(96, 16, (2, 6), 4), (75, 5, (1, 3), 18), (80, 16, (2, 2), 1)]
)
def test_groups_of_channels(kind: str, e: int, n: int, groups: tuple[int, int], new: int) -> None:
    """Each group has its own B and C, with as many channels as a block, fewer, or more."""
    feeds = feeds_of(kind, 2 + new, 1 + new % 2, True, e, n, groups)
    check(feeds, Run(range(2), range(2, 2 + new), 1, LAST if new > 5 else ADVANCED))
    if new == 4:
        check(feeds, Run(range(2), range(2, 6), parents=PARENTS[:4]))
        check(with_product(feeds, 48), Run(range(2), range(2, 6), store=LAST))


@kinds
@pytest.mark.parametrize("batch", [1, 2])
def test_trees(kind: str, batch: int) -> None:
    """Each token's y follows its own path, and the state is the one before the tree."""
    feeds = feeds_of(kind, 10, batch, a_channel=True)
    run = Run(range(3), range(3, 10), 2, ADVANCED, parents=PARENTS)
    tree = check(feeds, run)
    for t in (2, 3, 5):
        tokens = [3 + i for i in run.path(t)]
        path = run_scan(feeds, Run(range(3), tokens))
        assert same_sums(path.y[-1], tree.y[t])


@kinds
def test_a_tree_without_branches_is_a_chain(kind: str) -> None:
    feeds = feeds_of(kind, 8, 2)
    chain = run_scan(feeds, Run(range(3), range(3, 8)))
    tree = run_scan(feeds, Run(range(3), range(3, 8), parents=range(-1, 4)))
    assert same_sums(tree.y, chain.y)


@pytest.mark.parametrize("kind", ["32", "8"])
@pytest.mark.parametrize("a_channel", [False, True])
@pytest.mark.parametrize("rank", [48, 160])
def test_makes_dt_of_int8_values(kind: str, a_channel: bool, rank: int) -> None:
    """y, and the bits of the log and the states, equal those of a scan that gets dt as input."""
    feeds = feeds_of(kind, 10, 2, a_channel)
    made = with_product(feeds, rank)
    assert len(np.unique(made["dt"])) > 100
    given = feeds | {"dt": made["dt"]}
    for run in (
        Run(range(3), range(3, 8), 2, ADVANCED),
        Run(range(3), range(3, 7), parents=PARENTS[:4]),
        Run((), [3], store=LAST),
    ):
        found, alone = run_scan(made, run), run_scan(given, run)
        assert same_sums(found.y, alone.y) and same_bits(found.states, alone.states)


@pytest.mark.parametrize("half", [False, True])
def test_makes_dt_of_floating_values(half: bool) -> None:
    feeds = with_product(feeds_of("fp32", 10, 2), 48, half)
    check(feeds, Run(range(3), range(3, 10), 2, ADVANCED))
    check(feeds, Run(range(3), range(3, 10), parents=PARENTS))


def test_fp16_values_and_logs() -> None:
    feeds = feeds_of("fp32", 8, 2)
    feeds |= {name: feeds[name].astype(np.float16) for name in VALUES}
    found = run_scan(feeds, Run(range(3), range(3, 8), store=LAST))
    wide = feeds | {name: feeds[name].astype(np.float32) for name in VALUES}
    same = check(wide, Run(range(3), range(3, 8), store=LAST))
    assert same_bits(found.y, same.y) and same_bits(found.states[1], same.states[1])


@kinds
def test_nothing_new_advances_the_state(kind: str) -> None:
    """T = 0: the pending tokens are applied, into the other slot."""
    feeds = feeds_of(kind, 4, 2)
    check(feeds, Run(range(4), (), store=LAST, source=1))
    settled = run_scan(feeds, Run((), (), store=LAST))
    assert same_bits(settled.states[1], torch.from_numpy(feeds["ssm_state"]))


@kinds
def test_advances_by_any_number_of_pending_tokens(kind: str) -> None:
    feeds = feeds_of(kind, 5, 2)
    for advance in (1, 3):
        check(feeds, Run(range(3), range(3, 5), advance, ADVANCED))


@kinds
def test_a_chain_is_its_single_steps(kind: str) -> None:
    """Prefill, replay and steps give the same bits of y and of the state."""
    feeds = feeds_of(kind, 17, 2, a_channel=True)
    together = run_scan(feeds, Run((), range(17), store=LAST))
    for pending in (3, 16):
        rest = run_scan(feeds, Run(range(pending), range(pending, 17), store=LAST, source=1))
        assert same_bits(rest.y, together.y[pending:])
        assert same_bits(rest.states[0], together.states[1])
    settled = run_scan(feeds, Run(range(17), (), store=LAST))
    assert same_bits(settled.states[1], together.states[1])


@kinds
def test_sequences_do_not_know_of_each_other(kind: str) -> None:
    feeds = feeds_of(kind, 5, 3)
    all_three = run_scan(feeds, Run(range(2), range(2, 5), store=LAST))
    for b in range(3):
        alone = {
            name: value[:, b : b + 1] if name in VALUES else value for name, value in feeds.items()
        } | {"ssm_state": feeds["ssm_state"][b : b + 1]}
        one = run_scan(alone, Run(range(2), range(2, 5), store=LAST))
        assert same_bits(one.y[:, 0], all_three.y[:, b])
        assert same_bits(one.states[1, 0], all_three.states[1, b])


def test_an_int8_state_saturates_and_rounds_half_to_even() -> None:
    """Δ is exactly 32 and the old state vanishes: h is x·B / 2."""
    b = np.array([1, 3, 5, -1, -3, -5, 7, 127, -128, 0], np.int8)
    one, steps = np.ones(1, np.float32), np.array([1, 2, 4], np.int8)
    feeds = feeds_of("8", 1, 1, e=3, n=10) | {
        "x": steps[None, None], "x_scale": one / 64, "B": b[None, None], "B_scale": one,
        "dt": np.full((1, 1, 3), 64, np.int8), "dt_scale": one / 2,
        "dt_bias": np.zeros(3, np.int8),
        "A_log": np.full((10, 3), 127, np.int8), "A_log_scale": one / 20, "state_scale": one,
    }  # fmt: skip
    states = run_scan(feeds, Run((), [0], store=LAST)).states[1, 0]
    assert states[:, 0].tolist() == [0, 2, 2, 0, -2, -2, 4, 64, -64, 0]
    assert states[:, 1].tolist() == [1, 3, 5, -1, -3, -5, 7, 127, -128, 0]
    assert states[:, 2].tolist() == [2, 6, 10, -2, -6, -10, 14, 127, -128, 0]
