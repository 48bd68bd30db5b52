"""Sampling against plain definitions, and as a distribution."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from edge.errors import EngineError, InputError, StateError
from edge.runtime.parameters import Sampling, SamplingParams, make_params
from edge.runtime.sampling import Distribution, Sampler, new_rng, restore_rng, rng_state
from tests.markov_models import shares

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -math.inf], np.float32)


def plain_distribution(
    logits: list[float], params: SamplingParams, history: list[int]
) -> dict[int, float]:
    """Apply the filters one by one over a dictionary, as transformers states them."""
    scores = dict(enumerate(logits))
    for token, bias in params.logit_bias.items():
        scores[token] = float(np.float32(scores[token]) + np.float32(bias))
    recent = history[-params.repetition_window :]
    for token in set(recent):
        score, penalty = np.float32(scores[token]), np.float32(params.repetition_penalty)
        scores[token] = float(score / penalty if score > 0 else score * penalty)
        scores[token] -= params.presence_penalty + params.frequency_penalty * recent.count(token)
    scores = {i: score for i, score in scores.items() if score > -math.inf}
    best = max(scores.values())
    weights = {i: math.exp((score - best) / params.temperature) for i, score in scores.items()}
    if params.top_k:
        lowest = sorted(scores.values(), reverse=True)[: params.top_k][-1]
        weights = {i: weight for i, weight in weights.items() if scores[i] >= lowest}
    kept: dict[int, float] = {}
    for i in sorted(weights, key=lambda i: (-weights[i], i)):
        if params.top_p < 1 and sum(kept.values()) >= params.top_p * sum(weights.values()):
            break
        kept[i] = weights[i]
    kept = {i: w for i, w in kept.items() if w >= params.min_p}
    return {i: w / sum(kept.values()) for i, w in kept.items()}


@given(
    logits=st.lists(st.integers(-4000, 4000), min_size=2, max_size=40, unique=True),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    penalty=st.floats(0.5, 2),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    history=st.lists(st.integers(0, 1), max_size=5),
    bias=st.dictionaries(st.integers(0, 1), st.floats(-5, 5), max_size=2),
)
@settings(max_examples=150)
def test_every_filter_is_its_definition(
    logits: list[int], temperature: float, top_k: int, top_p: float, min_p: float,
    penalty: float, presence: float, frequency: float, history: list[int], bias: dict[int, float],
) -> None:  # fmt: skip
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=penalty, presence_penalty=presence, frequency_penalty=frequency,
        logit_bias=bias,
    )  # fmt: skip
    values = np.array(logits, np.float32) / 500
    found = shares(Sampler(params).distribution(values, history))
    scores = values.astype(float).tolist()
    plain = plain_distribution(scores, params, history)
    free = replace(params, top_p=1.0, min_p=0.0)
    sizes = sorted(plain_distribution(scores, free, history).values(), reverse=True)
    # fp32 may decide differently for a token exactly on a limit
    sums = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    assume(not any(abs(total - top_p) < 1e-4 for total in sums))
    assume(not any(abs(size / sizes[0] - min_p) < 1e-4 for size in sizes))
    assert found == pytest.approx({i: p for i, p in plain.items() if p > 1e-37}, rel=1e-4)


def test_the_definitions_above_tell_a_wrong_filter() -> None:
    """Order matters: top-p before temperature, or min-p of the wrong maximum, would show."""
    params = SamplingParams(temperature=2.0, top_p=0.6, min_p=0.7)
    logits = LOGITS.astype(float).tolist()
    right = plain_distribution(logits, params, [])
    cold = SamplingParams(temperature=1.0, top_p=0.6, min_p=0.7)
    assert plain_distribution(logits, cold, []).keys() != right.keys()
    assert plain_distribution(logits, SamplingParams(temperature=2.0, top_p=0.6), []) != right
    assert shares(Sampler(params).distribution(LOGITS)).keys() == right.keys()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": {3: 1.0}},
    ],
)
def test_drawn_tokens_follow_the_distribution(values: dict[str, Any]) -> None:
    params = SamplingParams(seed=7, **values)
    sampler, count = Sampler(params), 20_000
    drawn = [sampler(LOGITS, [0, 1]) for _ in range(count)]
    plain = plain_distribution(LOGITS.astype(float).tolist(), params, [0, 1])
    observed = {i: drawn.count(i) for i in set(drawn)}
    assert observed.keys() <= plain.keys()

    def chi_square(expected: dict[int, float]) -> float:
        return sum((observed.get(i, 0) - count * p) ** 2 / (count * p) for i, p in expected.items())

    # 99.9 % of chi-square with 6 degrees of freedom, the most that occur here, is below 22.5
    assert chi_square(plain) < 22.5
    # and a distribution that is 15 % off in one token would be detected
    shifted = {
        i: p * (1.15 if i == max(plain, key=plain.__getitem__) else 1) for i, p in plain.items()
    }
    shifted = {i: p / sum(shifted.values()) for i, p in shifted.items()}
    assert len(plain) == 1 or chi_square(shifted) > 22.5


def test_top_p_over_a_large_vocabulary() -> None:
    """With more tokens than the first guess covers, against sorting everything."""
    logits = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
    for top_p in (0.001, 0.3, 0.9, 0.9999):
        found = shares(Sampler(SamplingParams(temperature=1.0, top_p=top_p)).distribution(logits))
        weights = np.exp(logits.astype(np.float64) - float(logits.max()))
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        expected = int(np.searchsorted(sums, top_p * weights.sum())) + 1
        assert abs(len(found) - expected) <= 1 + expected / 10_000
        assert set(order[: min(len(found), expected)].tolist()) <= {*found, *order[-1:]}
        assert sum(found.values()) == pytest.approx(1)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0]), min_size=1, max_size=40),
    repeat=st.integers(1, 60),
    uniform=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200)
def test_a_draw_is_the_place_in_the_running_sum(
    weights: list[float], repeat: int, uniform: float
) -> None:
    values = np.array([*weights * repeat, 1.0, 0.0], np.float32)
    drawn = Distribution(None, values).draw(uniform)
    sums = np.cumsum(values, dtype=np.float64)
    assert values[drawn] > 0
    slack = 1e-12 * sums[-1]
    assert sums[drawn] - values[drawn] - slack <= uniform * sums[-1] <= sums[drawn] + slack


def test_top_k_finds_the_likeliest_however_far_apart_they_are() -> None:
    """Few of them near the best, or all, and ties with the last that is kept."""
    rng = np.random.default_rng(5)
    for spread in (0.1, 3.0, 100.0):
        logits = (spread * rng.normal(size=900)).astype(np.float32)
        logits[rng.integers(0, 900, 300)] = -math.inf
        for count in (1, 2, 40, 700, 899):
            ranked = np.argsort(-logits, kind="stable")
            tied = {*np.flatnonzero(logits >= logits[ranked[count - 1]]).tolist()}
            possible = {token for token in tied if logits[token] - logits.max() > -80}
            sampler = Sampler(SamplingParams(temperature=1.0, top_k=count))
            assert possible <= shares(sampler.distribution(logits)).keys() <= tied
            finite = [token for token in ranked[:count].tolist() if logits[token] > -math.inf]
            assert sampler.likeliest(logits, [], count) == finite


def test_greedy_is_the_best_after_bias_and_penalty() -> None:
    assert Sampler(SamplingParams(temperature=0))(LOGITS) == 0
    assert Sampler(SamplingParams(temperature=0, logit_bias={5: 9.0}))(LOGITS) == 5
    assert Sampler(SamplingParams(temperature=0, repetition_penalty=4))(LOGITS, [0]) == 6
    # a draw from one candidate is the same choice
    assert Sampler(SamplingParams(temperature=1, top_k=1))(LOGITS) == 0
    assert Sampler(SamplingParams(temperature=1e-30))(LOGITS) == 0
    assert LOGITS[5] == -3.0  # the logits are never written to


def test_the_penalty_looks_at_the_window_only() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=4, repetition_window=2)
    assert Sampler(params)(LOGITS, [0, 1, 2]) == 0
    assert Sampler(params)(LOGITS, [1, 0, 2]) == 6


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_logits_that_say_nothing_are_an_error(temperature: float, bad: float | None) -> None:
    logits = LOGITS.copy()
    if bad is None:
        logits[:] = -math.inf
    else:
        logits[3] = bad
    with pytest.raises(EngineError, match="logit"):
        Sampler(SamplingParams(temperature=temperature))(logits)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, "1", True, [1], 101])
def test_bad_numbers_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0), ("repetition_penalty", 0), ("top_k", -1), ("top_k", 1.5), ("seed", -1),
        ("seed", 1 << 64), ("seed", 1.0), ("max_tokens", 0), ("max_tokens", True),
        ("repetition_window", -1), ("deadline_s", 0), ("deadline_s", math.nan), ("stop", [""]),
        ("stop", 5), ("logit_bias", [1]), ("logit_bias", {-1: 0.0}), ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 0.0}),
    ],
)  # fmt: skip
def test_other_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


def test_unknown_parameters_and_ids_are_refused() -> None:
    with pytest.raises(InputError, match=r"unknown parameter 'temprature'.*'temperature'"):
        make_params({}, {"temprature": 1})
    with pytest.raises(InputError, match="logit_bias"):
        Sampler(SamplingParams(logit_bias={8: 1.0}))(LOGITS)
    params = make_params({"top_k": 5, "top_p": None}, {"top_p": None, "seed": 3})
    assert (params.top_k, params.top_p, params.seed) == (5, 1.0, 3)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(InputError) as caught:
        make_params({}, {"top": 1, "seeed": 2, "min_p": 3, "stop": 5, "logit_bias": {"a": 1}})
    said = str(caught.value)
    for name in ("'top'", "'seeed'", "min_p", "stop", "logit_bias"):
        assert name in said
    assert "did you mean 'seed'?" in said
    assert set(Sampling.__annotations__) == {item.name for item in fields(SamplingParams)}


def test_seeds_repeat_and_saved_random_numbers_continue() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    first, second = Sampler(params), Sampler(params)
    assert [first(LOGITS) for _ in range(50)] == [second(LOGITS) for _ in range(50)]
    saved = json.loads(json.dumps(rng_state(first.rng)))
    free = SamplingParams(temperature=1.0)
    third = Sampler(free, restore_rng(saved))
    assert [third(LOGITS) for _ in range(50)] == [first(LOGITS) for _ in range(50)]
    assert rng_state(new_rng(None)) != rng_state(new_rng(None))
    for bad in ({}, saved | {"state": "x"}, saved | {"kind": "MT"}, saved | {"inc": str(1 << 200)}):
        with pytest.raises(StateError, match="random numbers"):
            restore_rng(bad)
