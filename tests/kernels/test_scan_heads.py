"""The per-head scan kernels: against the references, and what a run may and may not change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.head_scans import (
    DeltaLayer,
    Layer,
    Outcome,
    Run,
    launch,
    part,
    replace,
    same,
    untouched,
)
from tests.kernels.rowwise import MANY, TREE, assert_steps
from tests.on_device import same_sums

FLOAT = Layer(bits=32, int8=False)
FORMS = {
    "float": FLOAT,
    "int8-f32": Layer(bits=32),
    "int8-f16": Layer(bits=16),
    "int8-i8": Layer(bits=8),
    "channels-i8": Layer(bits=8, channels=True),
    "channels-f16": Layer(bits=16, channels=True),
    "wide": Layer(p=5, n=200, bits=32, int8=False),  # tiles of every size
    "wide-i8": Layer(p=5, n=200, bits=8),
    "delta": DeltaLayer(),
    "wide-delta": DeltaLayer(p=5, n=128),
}
forms = pytest.mark.parametrize("layer", FORMS.values(), ids=FORMS)
# each type of state, and each number of scales
_EACH = ("float", "int8-f32", "int8-i8", "channels-f16", "wide", "wide-i8", "delta", "wide-delta")
some_forms = pytest.mark.parametrize("layer", [FORMS[name] for name in _EACH], ids=_EACH)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def outputs_agree(layer: Layer, found: Tensor, expected: Tensor) -> None:
    """Compare outputs; where a rounded state is one step off, a later y differs by that step times
    C.
    """
    if layer.bits == 32:
        close(found, expected)
        return
    apart = ~torch.isclose(found, expected, rtol=2e-5, atol=2e-5)
    assert int(apart.sum()) <= max(1, found.numel() // 100)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.3)


def states_agree(found: Tensor, expected: Tensor) -> None:
    """Compare states: int8 in steps, fp16 up to a rounding, or fp32."""
    if found.dtype == torch.int8:
        assert_steps(found, expected)
    elif found.dtype == torch.float16:
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    else:
        close(found, expected)


def joined(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([value, b[name]]) for name, value in a.items()}


@forms
@pytest.mark.parametrize("steps", [1, 5])
def test_chain_agrees_with_the_reference(layer: Layer, steps: int) -> None:
    tokens, state = layer.tokens(steps, 2), layer.start(2)
    out = launch(Run(layer, state, tokens, store=2, source=1))
    y, last = layer.reference(tokens, state)
    outputs_agree(layer, out.y, y)
    states_agree(out.state[0], last)
    assert same(out.state[1], state)
    assert all(untouched(log) for log in out.logs.values())


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("int8", [False, True])
def test_heads_share_the_matrices_of_their_group(groups: int, int8: bool) -> None:
    layer = Layer(heads=4, groups=groups, int8=int8, bits=32, channels=int8, n=24)
    tokens, state = layer.tokens(3, 1), layer.start(1)
    out = launch(Run(layer, state, tokens, store=2))
    y, last = layer.reference(tokens, state)
    outputs_agree(layer, out.y, y)
    states_agree(out.state[1], last)


@pytest.mark.parametrize("layer", [FLOAT, FORMS["int8-i8"]], ids=["float", "int8"])
def test_step_sizes_are_clamped(layer: Layer) -> None:
    layer = replace(layer, dt_limit=(0.4, 0.9))
    tokens, state = layer.tokens(4, 1), layer.start(1)
    out = launch(Run(layer, state, tokens, store=2))
    free, _ = replace(layer, dt_limit=(0.0, float("inf"))).reference(tokens, state)
    y, last = layer.reference(tokens, state)
    outputs_agree(layer, out.y, y)
    states_agree(out.state[1], last)
    assert (y - free).abs().max() > 0.1


@pytest.mark.parametrize(("groups", "most"), [(1, 1.0), (2, 2.0), (4, 1.0)])
def test_the_delta_rule_writes_as_strongly_as_it_is_told(groups: int, most: float) -> None:
    layer = DeltaLayer(heads=4, groups=groups, n=24, beta_max=most)
    tokens, state = layer.tokens(4, 2), layer.start(2)
    out = launch(Run(layer, state, tokens, store=2))
    y, last = layer.reference(tokens, state)
    outputs_agree(layer, out.y, y)
    states_agree(out.state[1], last)
    other, _ = replace(layer, beta_max=3 - most).reference(tokens, state)
    assert (y - other).abs().max() > 0.1


@pytest.mark.parametrize(
    "layer",
    [Layer(heads=2, p=64, n=128, bits=8), DeltaLayer(heads=2, p=128, n=128)],
    ids=["mamba2", "delta"],
)
def test_the_tiles_that_ship(layer: Layer) -> None:
    tokens, state = layer.tokens(3, 1), layer.start(1)
    out = launch(Run(layer, state, tokens, store=2))
    y, last = layer.reference(tokens, state)
    outputs_agree(layer, out.y, y)
    states_agree(out.state[1], last)


def stepwise(layer: Layer, tokens: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Run token by token, storing the state each time."""
    ys = []
    for t in range(tokens["x"].shape[0]):
        out = launch(Run(layer, state, part(tokens, slice(t, t + 1)), store=2))
        ys.append(out.y)
        state = out.state[1]
    return torch.cat(ys), state


@forms
def test_a_chain_gives_the_bits_of_its_steps(layer: Layer) -> None:
    tokens, state = layer.tokens(6, 2), layer.start(2)
    y, last = stepwise(layer, tokens, state)
    out = launch(Run(layer, state, tokens, store=2))
    assert same(out.y, y) and same(out.state[1], last)


@pytest.mark.parametrize("layer", [FORMS["int8-i8"], FORMS["int8-f16"]], ids=["i8", "f16"])
def test_prefill_gives_the_bits_of_steps(layer: Layer) -> None:
    tokens, state = layer.tokens(17, 1), layer.start(1)
    y, last = stepwise(layer, tokens, state)
    out = launch(Run(layer, state, tokens, store=2, regime=MANY))
    assert same(out.y, y) and same(out.state[1], last)


def replayed(layer: Layer, pending: int, steps: int, **how: int) -> tuple[Run, Outcome]:
    """Run with `pending` tokens in the log, at unordered slots, and `steps` new ones."""
    tokens = layer.tokens(pending + steps, 2)
    slots = tuple((7 * j + 3) % 12 for j in range(pending + steps))
    run = Run(
        layer,
        layer.start(2),
        part(tokens, slice(pending, None)),
        old=part(tokens, slice(0, pending)),
        replay=slots[:pending],
        slots=slots[pending:],
        **how,  # type: ignore[arg-type]
    )
    return run, launch(run)


@some_forms
def test_replay_gives_the_bits_of_the_tokens_run_before(layer: Layer) -> None:
    run, out = replayed(layer, 3, 2, store=2)
    assert run.old is not None
    y, last = stepwise(layer, joined(run.old, run.new), run.state)
    assert same(out.y, y[3:]) and same(out.state[1], last)


@forms
def test_new_tokens_are_kept_in_their_slots_and_nothing_else_is(layer: Layer) -> None:
    run, out = replayed(layer, 3, 2)
    assert run.old is not None
    for name, log in out.logs.items():
        for slot, row in zip(run.replay, run.old[name], strict=True):
            assert same(log[slot], row)
        for slot, row in zip(run.slots, run.new[name], strict=True):
            assert same(log[slot], row)
        free = [slot for slot in range(12) if slot not in run.replay + run.slots]
        assert untouched(log[free])
    assert same(out.state[0], run.state) and untouched(out.state[1])


def test_tokens_without_a_slot_are_not_kept() -> None:
    layer = FORMS["int8-i8"]
    tokens = layer.tokens(3, 1)
    out = launch(Run(layer, layer.start(1), tokens, slots=(4, -1, 0)))
    for name, log in out.logs.items():
        assert same(log[4], tokens[name][0]) and same(log[0], tokens[name][2])
        assert untouched(log[[s for s in range(12) if s not in (0, 4)]])


@some_forms
def test_the_state_after_any_replayed_token_can_be_stored(layer: Layer) -> None:
    run, unstored = replayed(layer, 3, 1)
    assert run.old is not None
    reached = run.state
    for advance in (1, 2, 3):
        _, reached = stepwise(layer, part(run.old, slice(advance - 1, advance)), reached)
        out = launch(replace(run, store=1, advance=advance))
        assert same(out.state[1], reached) and same(out.state[0], run.state)
        assert same(out.y, unstored.y)
    # a run of no tokens settles the state
    nothing = replace(run, new=part(run.new, slice(0, 0)), slots=())
    for how in ({"store": 2}, {"store": 1, "advance": 3}):
        assert same(launch(replace(nothing, **how)).state[1], reached)


def test_sequences_are_independent() -> None:
    layer = FORMS["channels-i8"]
    tokens, state = layer.tokens(4, 3), layer.start(3)
    together = launch(Run(layer, state, tokens, store=2, slots=(3, 1, 0, 2)))
    for b in range(3):
        mine = {name: value[:, b : b + 1] for name, value in tokens.items()}
        alone = launch(Run(layer, state[b : b + 1], mine, store=2, slots=(3, 1, 0, 2)))
        assert same(together.y[:, b : b + 1], alone.y)
        assert same(together.state[1, b : b + 1], alone.state[1])
        for name, log in alone.logs.items():
            assert same(together.logs[name][:, b : b + 1], log)


def ancestors_of(parents: list[int]) -> Tensor:
    """Return [T, T] from each token's parent, -1 for none."""
    found = torch.eye(len(parents))
    for t, parent in enumerate(parents):
        if parent >= 0:
            found[t] += found[parent]
    return found


@some_forms
def test_a_tree_that_is_a_chain_gives_its_bits(layer: Layer) -> None:
    run, chain = replayed(layer, 2, 4)
    tree = launch(replace(run, regime=TREE, ancestors=ancestors_of([-1, 0, 1, 2])))
    assert same_sums(tree.y, chain.y) and same(tree.state, chain.state)
    assert all(same(tree.logs[name], log) for name, log in chain.logs.items())


@pytest.mark.parametrize(
    "layer", [FLOAT, FORMS["int8-i8"], FORMS["delta"]], ids=["float", "int8", "delta"]
)
def test_each_path_of_a_tree_is_a_chain(layer: Layer) -> None:
    parents = [-1, 0, 0, -1, 2, 3, 4]
    run, _ = replayed(layer, 2, 7)
    ancestors = ancestors_of(parents)
    out = launch(replace(run, regime=TREE, ancestors=ancestors, store=1, advance=2))
    for t in (1, 5, 6):
        path = ancestors[t].nonzero().flatten().tolist()
        slots = tuple(run.slots[j] for j in path)
        alone = launch(replace(run, new=part(run.new, path), slots=slots, store=1, advance=2))
        assert same_sums(out.y[path], alone.y)
        # the delta rule's state itself holds sums
        alike = same_sums if isinstance(layer, DeltaLayer) else same
        assert alike(out.state, alone.state)


def test_nan_in_the_input_is_seen_in_the_output() -> None:
    tokens = FLOAT.tokens(2, 1)
    tokens["dt"][0, 0, 1] = float("nan")
    out = launch(Run(FLOAT, FLOAT.start(1), tokens, store=2))
    assert out.y[:, :, FLOAT.p : 2 * FLOAT.p].isnan().all()
    assert out.y[:, :, : FLOAT.p].isfinite().all()
