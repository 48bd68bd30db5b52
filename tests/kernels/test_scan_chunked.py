"""Mamba-2's prefill in chunks, against the sequential reference, and what it may change.

The launches are those of `scan_terms` and `scan_chunks`.

The tolerance is that of sums of N + T fp32 products in a different order: 2·10⁻⁵ of the largest
output (of the largest state).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from edge.launch import Size
from edge.plugins.lowering.context import Arguments, Lowering
from edge.plugins.selective_scan_heads import lowering
from edge.plugins.selective_scan_heads.lowering import CHUNK
from tests.kernels.head_scans import (
    Layer,
    Run,
    check_independent,
    check_kept,
    launch,
    part,
    replace,
    same,
    untouched,
)
from tests.kernels.rowwise import CHAIN, MANY
from tests.on_device import native

FLOAT = Layer(bits=32, int8=False)
FORMS = {"float": FLOAT, "int8": Layer(bits=32), "channels": Layer(bits=32, channels=True)}
forms = pytest.mark.parametrize("layer", FORMS.values(), ids=FORMS)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@forms
@pytest.mark.parametrize("steps", [1, 2, 17, 63, 64, 100, 130])
def test_prefill_agrees_with_the_sequential_reference(layer: Layer, steps: int) -> None:
    tokens, state = layer.tokens(steps, 2), layer.start(2)
    out = launch(Run(layer, state, tokens, store=2, source=1, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y)
    close(out.state[0], last)
    assert same(out.state[1], state)
    assert all(untouched(log) for log in out.logs.values())


@pytest.mark.parametrize("batch", [1, 2])
def test_every_chunk_starts_from_its_own_state(batch: int) -> None:
    """Chunks are apart: outputs are computed from states that were stored, one for each chunk."""
    layer = FORMS["int8"]
    tokens, state = layer.tokens(150, batch), layer.start(batch)
    out = launch(Run(layer, state, tokens, store=2, regime=MANY))
    if native():  # which keeps no such states
        return
    assert len(out.starts) == 2
    for chunk in (1, 2):
        _, h = layer.reference(part(tokens, slice(0, CHUNK * chunk)), state)
        close(out.starts[chunk - 1], h)


@forms
def test_plans_of_earlier_versions_run_on_a_cpu(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They launch one kernel, which GPUs no longer have."""
    if not native():
        pytest.skip("GPUs need a new export")

    def in_turn(
        at: Lowering, _: object, arguments: Arguments, constants: Mapping[str, Any]
    ) -> None:
        given = {n: v for n, v in arguments.items() if n not in ("state_scale", "ancestors")}
        sizes = {name: value for name, value in constants.items() if name != "STATE_SCALES"}
        sizes |= {"BLOCK_P": 64, "BLOCK_N": 32, "CHUNK": 16}
        grid = (Size(times=constants["HEADS"]), Size(times=1), Size(of="B"))
        at.launch("scan_chunked.scan", given, sizes, grid, warps=8, stages=1, settles=True)

    monkeypatch.setattr(lowering, "by_chunks", in_turn)
    tokens, state = layer.tokens(37, 2), layer.start(2)
    out = launch(Run(layer, state, tokens, store=2, source=1, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y)
    close(out.state[0], last)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("int8", [False, True])
def test_groups_and_odd_sizes(groups: int, int8: bool) -> None:
    layer = Layer(heads=4, p=70, n=24, groups=groups, int8=int8, bits=32)
    tokens, state = layer.tokens(37, 1), layer.start(1)
    out = launch(Run(layer, state, tokens, store=2, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y)
    close(out.state[1], last)


@pytest.mark.parametrize("int8", [False, True])
def test_the_tiles_that_ship(int8: bool) -> None:
    layer = Layer(p=64, n=128, int8=int8, bits=32)
    tokens, state = layer.tokens(33, 1), layer.start(1)
    out = launch(Run(layer, state, tokens, store=2, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y)
    close(out.state[1], last)


def test_decay_of_any_strength_is_safe() -> None:
    """Δ from 0 to 10,000: exponents of a chunk reach -10⁵, and no output is inf or NaN."""
    layer = replace(FLOAT, dt_limit=(0.0, 1e4))
    tokens, state = layer.tokens(40, 1), layer.start(1)
    mixed = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    tokens["dt"] = torch.linspace(-200, 1e4, 40)[mixed][:, None, None].repeat(1, 1, 2)
    tokens["x"] = tokens["x"] / 1e4
    out = launch(Run(layer, state, tokens, store=2, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y)
    close(out.state[1], last)


def test_a_token_that_is_no_number_reaches_later_tokens_alone() -> None:
    if not native():
        pytest.skip("a chunk of a GPU is one product of matrices")
    tokens, state = FLOAT.tokens(40, 1), FLOAT.start(1)
    expected, _ = FLOAT.reference(tokens, state)
    tokens["dt"][20, 0, 0] = float("nan")  # of head 0
    found = launch(Run(FLOAT, state, tokens, store=2, regime=MANY)).y.unflatten(-1, (2, -1))
    assert found[20:, :, 0].isnan().all()
    expected = expected.unflatten(-1, (2, -1))
    close(found[:20], expected[:20])
    close(found[:, :, 1], expected[:, :, 1])


def run_after(layer: Layer, pending: int, steps: int, **how: int) -> Run:
    """Return a run with `pending` tokens in the log and `steps` new ones, some of them kept."""
    tokens = layer.tokens(pending + steps, 2)
    slots = tuple((7 * j + 3) % 12 for j in range(12))
    return Run(
        layer,
        layer.start(2),
        part(tokens, slice(pending, None)),
        old=part(tokens, slice(0, pending)),
        replay=slots[:pending],
        slots=(-1,) * (steps - 4) + slots[pending : pending + min(4, steps)],
        regime=MANY,
        **how,  # type: ignore[arg-type]
    )


@forms
def test_replay_is_that_of_steps_bit_for_bit(layer: Layer) -> None:
    run = run_after(layer, 4, 20, store=1, advance=3)
    out = launch(run)
    step = launch(replace(run, new=part(run.new, slice(0, 1)), slots=(-1,), regime=CHAIN))
    assert same(out.state, step.state)
    settled = launch(replace(run, new=part(run.new, slice(0, 0)), slots=(), store=2))
    reached = launch(replace(run, new=part(run.new, slice(0, 0)), slots=(), store=2, regime=CHAIN))
    assert same(settled.state, reached.state)


@forms
def test_a_prefill_after_a_replay_goes_on_from_there(layer: Layer) -> None:
    run = run_after(layer, 3, 20, store=2)
    out = launch(run)
    assert run.old is not None
    both = {name: torch.cat([value, run.new[name]]) for name, value in run.old.items()}
    y, last = layer.reference(both, run.state)
    close(out.y, y[3:])
    close(out.state[1], last)


@forms
def test_tokens_with_a_slot_are_kept_and_nothing_else_is_written(layer: Layer) -> None:
    check_kept(run_after(layer, 3, 21))


def test_sequences_are_independent() -> None:
    check_independent(FORMS["int8"], 18)
