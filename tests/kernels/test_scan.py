"""Mamba-1's scan as a kernel: outputs, states, logs, and all that must stay as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge.ops.quantized_recurrent import SELECTIVE_SCAN_INT8
from edge.plugins import reference
from edge.plugins.lowering.scan import LOWER
from tests.int8_recurrent import TOLERANCE, Compared, batch_first, scan_feeds, torched
from tests.kernels.recurrent_inputs import (
    ADVANCED,
    LAST,
    Logs,
    Run,
    same_bits,
    two_slots,
)

Feeds = dict[str, Any]
STATE = "layers.3.ssm_state"
VALUES = ("x", "dt", "B", "C", "z")
bits = pytest.mark.parametrize("bits", [32, 16, 8])


@dataclass
class Result:
    """y [T, B, E]; states [2, B, N, E]."""

    y: Tensor
    states: Tensor


def run_int8(feeds: Feeds, run: Run, bits: int) -> Result:
    """The run, through its lowering; logs and the slot it starts from are checked here."""
    _, batch, channels = feeds["x"].shape
    bench, logs = run.bench(batch), Logs(run, batch)
    new = list(run.new)
    inputs = []
    for value in SELECTIVE_SCAN_INT8.inputs:
        name = value.name
        if name in VALUES:
            rows = torch.from_numpy(
                feeds[name][new].reshape(len(new) * batch, feeds[name].shape[2])
            )
            # B and C are columns of one product, z of another
            stride, start = {"B": (80, 48), "C": (80, 64), "z": (2 * channels, channels)}.get(
                name, (0, 0)
            )
            bench.value(name, rows, stride, start)
        elif value.role == "weight":
            bench.constant(name, torch.from_numpy(feeds[name]))
        inputs.append(STATE if name == "ssm_state" else name)
    before = two_slots(torch.from_numpy(feeds["ssm_state"]), run.source)
    bench.given("state", STATE, before)
    for name in ("x", "dt", "B"):
        logs.fill(bench, f"layers.3.scan_{name}", torch.from_numpy(feeds[name]))
    bench.lower(LOWER, "SelectiveScanInt8", tuple(inputs), ("y", "states"), state_bits=bits)
    bench.run()
    for name in ("x", "dt", "B"):
        logs.check(bench, f"layers.3.scan_{name}", torch.from_numpy(feeds[name]))
    states = bench.whole("state", STATE, tuple(before.shape))
    assert same_bits(states[run.source], before[run.source])
    if not run.store:
        assert same_bits(states, before)
    y = bench.read("y").view(len(new), batch, channels) if new else torch.zeros(0)
    return Result(y, states)


def expected_int8(feeds: Feeds, path: list[int]) -> tuple[Tensor, Tensor]:
    """y [len(path), B, E] and the state after the last."""
    values = []
    for name in ("x", "dt", "A_log", "B", "C", "D", "dt_bias", "z"):
        scale = torch.from_numpy(feeds[f"{name}_scale"])
        if name in VALUES:
            values += [*batch_first(feeds[name][path]), scale]
        else:
            value = torch.from_numpy(feeds[name])
            values += [value.T if name == "A_log" else value, scale]
    y, after = reference.selective_scan_int8(
        *values, *torched(feeds["ssm_state"], feeds["state_scale"])
    )
    return y.transpose(0, 1), after


def check_int8(feeds: Feeds, run: Run, bits: int) -> Result:
    """Against the reference: every y, and the stored state."""
    found, compared = run_int8(feeds, run, bits), Compared()
    for t in range(len(run.new)):
        y, _ = expected_int8(feeds, run.before(t))
        compared.floats(found.y[t].numpy(), y[-1].numpy(), TOLERANCE[bits])
    if run.store:
        path = [*run.pending, *run.new] if run.store == LAST else run.pending[: run.advance]
        _, after = expected_int8(feeds, list(path))
        compared.state(found.states[1 - run.source].numpy(), after.numpy())
    compared.check()
    return found


def feeds_of(
    tokens: int, batch: int, bits: int, a_channel: bool = False, e: int = 80, n: int = 16
) -> Feeds:
    rng = np.random.default_rng(tokens * 10 + batch)
    return scan_feeds(rng, tokens, batch, bits, a_channel, e, n)


@bits
@pytest.mark.parametrize("a_channel", [False, True])
@pytest.mark.parametrize(("pending", "new", "batch"), [(0, 1, 1), (3, 5, 2), (7, 17, 1), (1, 3, 3)])
def test_chains(bits: int, a_channel: bool, pending: int, new: int, batch: int) -> None:
    feeds = feeds_of(pending + new, batch, bits, a_channel)
    run = Run(range(pending), range(pending, pending + new), store=LAST, source=new % 2)
    check_int8(feeds, run, bits)


@bits
def test_nothing_new_advances_the_state(bits: int) -> None:
    """T = 0: what is pending is applied, to the other slot."""
    feeds = feeds_of(4, 2, bits)
    check_int8(feeds, Run(range(4), (), store=LAST, source=1), bits)
    settled = run_int8(feeds, Run((), (), store=LAST), bits)
    assert same_bits(settled.states[1], torch.from_numpy(feeds["ssm_state"]))


@bits
@pytest.mark.parametrize("advance", [1, 2, 3])
def test_advances_by_any_number_of_pending_tokens(bits: int, advance: int) -> None:
    feeds = feeds_of(5, 2, bits)
    check_int8(feeds, Run(range(3), range(3, 5), advance, ADVANCED), bits)


@bits
def test_a_chain_is_its_single_steps(bits: int) -> None:
    """Replayed, stepped or together: the same bits of y and of the state."""
    feeds = feeds_of(7, 2, bits, a_channel=True)
    together = run_int8(feeds, Run((), range(7), store=LAST), bits)
    for pending in (0, 1, 2, 5, 6):
        last = Run(range(pending), [pending], store=LAST, source=pending % 2)
        one = run_int8(feeds, last, bits)
        assert same_bits(one.y[0], together.y[pending])
        rest = run_int8(feeds, Run(range(pending), range(pending, 7), store=LAST), bits)
        assert same_bits(rest.y, together.y[pending:])
        assert same_bits(rest.states[1], together.states[1])
    assert same_bits(one.states[1 - last.source], together.states[1])


@bits
def test_sequences_do_not_know_of_each_other(bits: int) -> None:
    feeds = feeds_of(5, 3, bits)
    all_three = run_int8(feeds, Run(range(2), range(2, 5), store=LAST), bits)
    for b in range(3):
        alone = {
            name: value[:, b : b + 1] if name in VALUES else value for name, value in feeds.items()
        } | {"ssm_state": feeds["ssm_state"][b : b + 1]}
        one = run_int8(alone, Run(range(2), range(2, 5), store=LAST), bits)
        assert same_bits(one.y[:, 0], all_three.y[:, b])
        assert same_bits(one.states[1, 0], all_three.states[1, b])
