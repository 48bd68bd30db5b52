"""The int8 convolution and scans against the plain reference: outputs and every kept state."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from edge.plugins.catalogue import OPS
from edge.plugins.onnx import FLAVOURS, Flavour
from tests.int8_recurrent import (
    CASES,
    STATE_TYPES,
    TOLERANCE,
    Array,
    Compared,
    any_feeds,
    conv_expected,
    conv_feeds,
    heads_attributes,
    heads_expected,
    heads_feeds,
    routes,
    run,
    scale,
    scan_expected,
    scan_feeds,
    steering,
)
from tests.onnx_ops import (
    LENGTHS,
    chain,
    inputs_of,
    logged,
    one_op_model,
    path_to,
    random_parents,
    taps,
)

both = pytest.mark.parametrize("flavour", FLAVOURS)
# the other flavour is for the device graph, which has its own versions of these ops
ort_alone = pytest.mark.parametrize("flavour", ["ort"])
batches = pytest.mark.parametrize("batch", [1, 3])
lengths = pytest.mark.parametrize("steps", LENGTHS)
scans = pytest.mark.parametrize(("op", "groups"), CASES)
states = pytest.mark.parametrize("state_bits", [32, 16, 8])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


# -- convolution -----------------------------------------------------------------------------------


@both
@batches
@lengths
@pytest.mark.parametrize(("width", "a_channel"), [(2, False), (4, False), (4, True)])
def test_convolution(
    flavour: Flavour,
    batch: int,
    steps: int,
    width: int,
    a_channel: bool,
    rng: np.random.Generator,
) -> None:
    f, compared = conv_feeds(rng, steps, batch, width, a_channel), Compared()
    for parents, kept, _ in routes(steps, rng):
        rows = taps(parents, width)
        out = run("CausalConv1dInt8", flavour, f | {"taps": rows, "kept_taps": rows[kept, 1:]})
        for r, t in enumerate(kept):
            y, after = conv_expected(f, path_to(parents, int(t)))
            compared.int8(out["y"][t], y)
            assert np.array_equal(out["conv_states"][r], after)
    compared.check()


@both
def test_convolution_saturates_and_rounds_half_to_even(flavour: Flavour) -> None:
    """With one tap of weight 1 and huge inputs silu(v) is v, so the steps are known exactly."""
    q = np.array([-128, -1, 0, 1, 25, 26, 27, 100, 127], np.int8)
    f = {
        "x": q[None, None], "x_scale": np.array([64], np.float32),
        "conv_state": np.zeros((1, 1, 9), np.int8),
        "weight": np.array([[[0] * 9], [[1] * 9]], np.int8), "weight_scale": scale(127),
        "bias": np.zeros(9, np.int8), "bias_scale": scale(1),
        "y_scale": np.array([128], np.float32),
        "taps": np.array([[0, 1]]), "kept_taps": np.array([[1]]),
    }  # fmt: skip
    f["x"][0, 0, 0] = 3
    expected = np.array([2, 0, 0, 0, 12, 13, 14, 50, 64], np.int8)
    assert np.array_equal(run("CausalConv1dInt8", flavour, f)["y"][0, 0], expected)
    f["y_scale"] = np.array([0.5], np.float32)
    expected = np.array([127, 0, 0, 127, 127, 127, 127, 127, 127], np.int8)
    assert np.array_equal(run("CausalConv1dInt8", flavour, f)["y"][0, 0], expected)


# -- Mamba-1 ---------------------------------------------------------------------------------------


@ort_alone
@batches
@lengths
@states
@pytest.mark.parametrize("a_channel", [False, True])
def test_selective_scan(
    flavour: Flavour,
    batch: int,
    steps: int,
    state_bits: int,
    a_channel: bool,
    rng: np.random.Generator,
) -> None:
    compared, (op, groups) = Compared(), CASES[batch > 1]
    f, attributes = any_feeds(op, rng, steps, batch, groups, state_bits, a_channel)
    for route in routes(steps, rng):
        out = run(op, flavour, f | steering(*route), **attributes)
        for r, t in enumerate(route[1]):
            y, after = scan_expected(f, path_to(route[0], int(t)))
            compared.floats(out["y"][t], y, TOLERANCE[state_bits])
            compared.state(out["ssm_states"][r], after)
    compared.check()


# -- Mamba-2 ---------------------------------------------------------------------------------------


@ort_alone
@batches
@lengths
@states
@pytest.mark.parametrize(
    ("groups", "limit", "a_channel"),
    [(1, (0.0, float("inf")), False), (1, (0.01, 3.0), True), (2, (0.05, 0.8), False),
     (2, (0.0, float("inf")), True)],
)  # fmt: skip
def test_selective_scan_heads(
    flavour: Flavour,
    batch: int,
    steps: int,
    state_bits: int,
    groups: int,
    limit: tuple[float, float],
    a_channel: bool,
    rng: np.random.Generator,
) -> None:
    f, compared = heads_feeds(rng, steps, batch, groups, state_bits, a_channel), Compared()
    attributes = heads_attributes(groups, limit, state_bits)
    for route in routes(steps, rng):
        out = run("SelectiveScanHeadsInt8", flavour, f | steering(*route), **attributes)
        for r, t in enumerate(route[1]):
            y, after = heads_expected(f, path_to(route[0], int(t)), groups, limit)
            compared.floats(out["y"][t], y, TOLERANCE[state_bits])
            compared.state(out["ssm_states"][r], after)
    compared.check()


@ort_alone
@batches
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("count", "steps"), [(1, 1), (1, 4), (3, 1), (3, 4), (2, 65)])
def test_logged_tokens_come_before_the_run(
    flavour: Flavour, batch: int, groups: int, count: int, steps: int, rng: np.random.Generator
) -> None:
    f, whole = heads_feeds(rng, count + steps, batch, groups, 32), count + steps
    attributes, compared = heads_attributes(groups, (0.01, 3.0), 32), Compared()
    for tree in (chain(steps), random_parents(steps, rng)):
        parents = [*chain(count), *(parent + count for parent in tree)]
        for kept in ([count - 1], [whole - 1], [count - 1, whole - 1]):
            steered = steering(parents, np.array(kept, np.int64), False)
            out = run("SelectiveScanHeadsInt8", flavour, logged(f, count) | steered, **attributes)
            assert len(out["y"]) == steps
            for token in (count, whole - 1):
                y, _ = heads_expected(f, path_to(parents, token), groups, (0.01, 3.0))
                compared.floats(out["y"][token - count], y, TOLERANCE[32])
            for row, token in zip(out["ssm_states"], kept, strict=True):
                _, after = heads_expected(f, path_to(parents, token), groups, (0.01, 3.0))
                compared.state(row, after)
    compared.check()


# -- for any route ---------------------------------------------------------------------------------


def one_by_one(
    op: str, flavour: Flavour, feeds: dict[str, Array], **attributes: float
) -> tuple[Array, Array]:
    """Return y [T, …] and the state after T runs of one token each."""
    f, ys = dict(feeds), []
    moving = [n for n in ("x", "dt", "B", "C", "z") if n in feeds]
    for t in range(feeds["x"].shape[0]):
        now = {n: feeds[n][t : t + 1] for n in moving}
        step = steering([-1], np.array([0]), last_only=True)
        out = run(op, flavour, f | now | step, **attributes)
        ys.append(out["y"][0])
        f["ssm_state"] = out["ssm_states"][0]
    return np.stack(ys), f["ssm_state"]


@ort_alone
@scans
@pytest.mark.parametrize("state_bits", [16, 8])
def test_a_run_leaves_the_state_of_as_many_steps(
    flavour: Flavour, op: str, groups: int, state_bits: int, rng: np.random.Generator
) -> None:
    steps = 65
    f, attributes = any_feeds(op, rng, steps, 3, groups, state_bits)
    y, state = one_by_one(op, flavour, f, **attributes)
    compared = Compared()
    for kept, last_only in ((np.arange(steps), False), (np.array([steps - 1]), True)):
        out = run(op, flavour, f | steering(chain(steps), kept, last_only), **attributes)
        bits = np.int8 if state_bits == 8 else np.int16
        compared.steps(out["ssm_states"][-1].view(bits), state.view(bits))
        compared.floats(out["y"], y, 1e-6)
    compared.check()


@states
@pytest.mark.parametrize("steps", [4, 65])
def test_a_wide_run_of_mamba_1_is_as_many_steps_to_the_bit(
    steps: int, state_bits: int, rng: np.random.Generator
) -> None:
    """This makes greedy speculation exact. Channels must fill vectors: the rest of a row goes
    through code with other rounding.
    """
    op, f = "SelectiveScanInt8", scan_feeds(rng, steps, 1, state_bits, e=64)
    y, state = one_by_one(op, "ort", f, state_bits=state_bits)
    for kept, last_only in ((np.arange(steps), False), (np.array([steps - 1]), True)):
        feeds = f | steering(chain(steps), kept, last_only)
        out = run(op, "ort", feeds, state_bits=state_bits)
        assert np.array_equal(out["y"], y) and np.array_equal(out["ssm_states"][-1], state)


@scans
@states
def test_a_run_of_the_reference_is_as_many_steps_to_the_bit(
    op: str, groups: int, state_bits: int, rng: np.random.Generator
) -> None:
    f, _ = any_feeds(op, rng, 33, 3, groups, state_bits)
    expected = (
        scan_expected
        if "Heads" not in op
        else lambda feeds, path: heads_expected(feeds, path, groups, (0.01, 3.0))
    )
    stepped = dict(f)
    for t in range(33):
        y, stepped["ssm_state"] = expected(stepped, [t])
    whole_y, whole = expected(f, list(range(33)))
    assert np.array_equal(stepped["ssm_state"], whole) and np.array_equal(y, whole_y)


@ort_alone
@scans
@states
def test_extreme_states_stay_what_the_reference_says(
    flavour: Flavour, op: str, groups: int, state_bits: int, rng: np.random.Generator
) -> None:
    f, attributes = any_feeds(op, rng, 4, 2, groups, state_bits)
    largest = {32: 1e30, 16: 60000.0, 8: 127}[state_bits]
    signs = rng.choice([-1, 1], f["ssm_state"].shape)
    f["ssm_state"] = (signs * largest).astype(STATE_TYPES[state_bits])
    f["state_scale"] = np.array([1e-3], np.float32)  # an int8 state that saturates at once
    out = run(op, flavour, f | steering(chain(4), np.arange(4), False), **attributes)
    compared = Compared()
    for t in range(4):
        path = list(range(t + 1))
        if "Heads" not in op:
            y, after = scan_expected(f, path)
        else:
            y, after = heads_expected(f, path, groups, (0.01, 3.0))
        compared.floats(out["y"][t], y, TOLERANCE[state_bits])
        compared.state(out["ssm_states"][t], after)
    assert np.isfinite(out["y"]).all()
    if state_bits == 8:
        assert {-128, 127} <= set(out["ssm_states"].ravel().tolist())
    compared.check()


@pytest.mark.parametrize(("state_bits", "one_in"), [(16, 2_000), (8, 10_000)])
def test_of_a_wide_state_few_values_are_apart(
    state_bits: int, one_in: int, rng: np.random.Generator
) -> None:
    """400,000 values, enough to make a bound meaningful: the state of a 130M model.

    fp16 has such small steps that fp32's own errors cross a half more often than int8's, and where
    a sum cancels they are two of its steps.
    """
    steps = 16
    f = scan_feeds(rng, steps, 1, state_bits, e=1536, n=16)
    route = (chain(steps), np.arange(steps), False)
    out = run("SelectiveScanInt8", "ort", f | steering(*route), state_bits=state_bits)
    apart, compared = 0, Compared()
    for t in range(steps):
        _, after = scan_expected(f, list(range(t + 1)))
        compared.state(out["ssm_states"][t], after)
        apart += int((out["ssm_states"][t] != after).sum())
    assert apart <= out["ssm_states"].size / one_in


def judged_by_onnx(op: str, feeds: dict[str, Array], **attributes: float) -> list[Array]:
    """Return outputs of the standard flavour from ONNX's own evaluator."""
    ordered = inputs_of(OPS[op], feeds)
    types = [a.dtype for a in ordered.values()]
    name = OPS[op].function(attributes)
    model = one_op_model(name, "standard", attributes.items(), types)
    return [np.asarray(a) for a in ReferenceEvaluator(model).run(None, ordered)]


def test_the_standard_convolution_means_the_same_to_onnx(rng: np.random.Generator) -> None:
    rows, f = taps(chain(3), 4), conv_feeds(rng, 3, 2, 4, a_channel=True)
    f |= {"taps": rows, "kept_taps": rows[:, 1:]}
    y, states = judged_by_onnx("CausalConv1dInt8", f)
    found, compared = run("CausalConv1dInt8", "standard", f), Compared()
    compared.int8(found["y"], y)
    assert np.array_equal(found["conv_states"], states)
    compared.check()
