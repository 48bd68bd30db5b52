"""Prompts of the gated delta rule in chunks, against the sequential reference.

The launches are those of `delta_terms` and `delta_chunks`, and `delta_rule` for few tokens.

The tolerance is that of sums of N + T fp32 products in a different order: 2·10⁻⁵ of the largest
output (of the largest state).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edge.plugins.gated_delta_rule.lowering import CHUNK, FEW
from tests.kernels.head_scans import (
    DeltaLayer,
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
from tests.on_device import ON_GPU

LAYER = DeltaLayer()


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    most = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * most)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert same(found, expected)


def check(
    layer: DeltaLayer, tokens: dict[str, Tensor], batch: int = 1, tolerance: float = 2e-5
) -> None:
    """Compare outputs and the final state of a prompt with the reference's."""
    state = layer.start(batch)
    out = launch(Run(layer, state, tokens, store=2, source=1, regime=MANY))
    y, last = layer.reference(tokens, state)
    close(out.y, y, tolerance)
    close(out.state[0], last, tolerance)
    assert same(out.state[1], state)
    assert all(untouched(log) for log in out.logs.values())


@pytest.mark.parametrize("steps", [FEW + 1, CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 3])
def test_prompts_agree_with_the_sequential_reference(steps: int) -> None:
    check(LAYER, LAYER.tokens(steps, 2), 2)


@pytest.mark.parametrize(("groups", "most"), [(1, 1.0), (2, 2.0), (4, 2.0)])
def test_groups_odd_sizes_and_states_that_change_their_sign(groups: int, most: float) -> None:
    layer = DeltaLayer(heads=4, p=37, n=24, groups=groups, beta_max=most)
    check(layer, layer.tokens(CHUNK + 5, 1))


@pytest.mark.parametrize(("p", "n"), [(128, 128), (16, 256), (5, 3)])
def test_tiles_of_every_width(p: int, n: int) -> None:
    layer = DeltaLayer(p=p, n=n)
    check(layer, layer.tokens(CHUNK + 1, 1))


@pytest.mark.parametrize("steps", [1, 2, FEW])
def test_few_tokens_of_any_number_of_sequences_have_the_bits_of_steps(steps: int) -> None:
    tokens, state = LAYER.tokens(steps, 20), LAYER.start(20)
    many, chain = (
        launch(Run(LAYER, state, tokens, store=2, regime=regime)) for regime in (MANY, CHAIN)
    )
    assert same(many.y, chain.y) and same(many.state, chain.state)


def test_plans_of_earlier_versions_go_token_by_token() -> None:
    """Their prompts are one launch, that of a chain."""
    tokens, state = LAYER.tokens(CHUNK + 5, 2), LAYER.start(2)
    out = launch(Run(LAYER, state, tokens, store=2, source=1, regime=CHAIN))
    y, last = LAYER.reference(tokens, state)
    close(out.y, y)
    close(out.state[0], last)


# numpy's products, which the interpreter uses, are summed otherwise without AVX-512: β = 2, which
# doubles what it corrects, then differs by 2.2e-5
@pytest.mark.parametrize(("most", "tolerance"), [(1.0, 2e-5), (2.0, 4e-5)])
def test_equal_keys_lose_no_digits(most: float, tolerance: float) -> None:
    """Every token corrects all before it: powers of such a triangle reach 10⁸ in 32 rows."""
    layer = DeltaLayer(p=18, n=20, beta_max=most)
    tokens = layer.tokens(2 * CHUNK, 1)
    tokens["B"] = tokens["B"][:1].expand_as(tokens["B"]).contiguous()
    tokens["dt"][..., : layer.heads] = -20.0  # hardly any decay
    tokens["dt"][..., layer.heads :] = 20.0  # β is its maximum
    check(layer, tokens, tolerance=tolerance)


def test_decay_of_any_strength_is_safe() -> None:
    """Exponents of a chunk reach -10⁵, one is infinite, and no output is inf or NaN."""
    tokens = LAYER.tokens(CHUNK + 8, 1)
    mixed = torch.randperm(CHUNK + 8, generator=torch.Generator().manual_seed(3))
    strength = torch.linspace(-200, 1e4, CHUNK + 8)[mixed]
    strength[7] = float("inf")
    tokens["dt"][..., : LAYER.heads] = strength[:, None, None]
    check(LAYER, tokens)


def test_weak_decays_beside_strong_ones_keep_their_digits() -> None:
    tokens = LAYER.tokens(CHUNK, 1)
    tokens["dt"][..., : LAYER.heads] = -6.0
    tokens["dt"][: CHUNK // 2, :, : LAYER.heads] = 40.0
    check(LAYER, tokens)


def after(pending: int, steps: int, batch: int = 2, **how: int) -> Run:
    """Return a run with `pending` tokens in the log and `steps` new ones, some of them kept."""
    layer = DeltaLayer(heads=4, groups=2)
    tokens = layer.tokens(pending + steps, batch)
    slots = tuple((7 * j + 3) % 12 for j in range(12))
    return Run(
        layer,
        layer.start(batch),
        part(tokens, slice(pending, None)),
        old=part(tokens, slice(0, pending)),
        replay=slots[:pending],
        slots=(-1,) * (steps - 4) + slots[pending : pending + 4],
        regime=MANY,
        **how,  # type: ignore[arg-type]
    )


def goes_on_from_a_replay() -> None:
    run = after(3, CHUNK + 7, store=2)
    out = launch(run)
    assert run.old is not None
    both = {name: torch.cat([value, run.new[name]]) for name, value in run.old.items()}
    y, last = run.layer.reference(both, run.state)
    close(out.y, y[3:])
    close(out.state[1], last)


def test_a_prompt_after_a_replay_goes_on_from_there() -> None:
    goes_on_from_a_replay()


def test_a_state_between_pending_tokens_is_stored() -> None:
    run = after(4, FEW + 2, store=1, advance=3)
    out = launch(run)
    assert run.old is not None
    _, reached = run.layer.reference(part(run.old, slice(0, 3)), run.state)
    close(out.state[1], reached)
    assert same(out.state[0], run.state)


def test_settling_has_the_bits_of_steps() -> None:
    run = after(4, FEW + 2, store=2)
    none = replace(run, new=part(run.new, slice(0, 0)), slots=())
    many, chain = (launch(replace(none, regime=regime)).state for regime in (MANY, CHAIN))
    # on a GPU two kernels may add a row's products in different orders
    (close if ON_GPU else assert_same)(many[1], chain[1])


def keeps_tokens_with_a_slot() -> None:
    check_kept(after(3, CHUNK + 5))


def test_tokens_with_a_slot_are_kept_and_nothing_else_is_written() -> None:
    keeps_tokens_with_a_slot()


def test_sequences_are_independent() -> None:
    check_independent(LAYER, CHUNK + 2)


RACES: tuple[Callable[[], None], ...] = (goes_on_from_a_replay, keeps_tokens_with_a_slot)
