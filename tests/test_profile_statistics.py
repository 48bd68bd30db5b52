"""Percentiles, deviations, ratios with an interval, and the checks of a sample of times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edge.apps.measure.statistics import percentile, ratio, spread, student_t95
from edge.apps.measure.stopwatch import in_turn
from edge.apps.profile.answers import AnswerPlan, Sample, answer, answers, depths


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(1)
    for count in (1, 2, 3, 10, 101):
        values = rng.exponential(size=count).tolist()
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_spread_of_few() -> None:
    assert spread([]) is None
    single = spread([3.0])
    assert single is not None and single.mean == single.p99 == 3.0 and single.deviation is None
    several = spread([1.0, 2.0, 3.0, 6.0])
    assert several is not None and several.deviation == pytest.approx(np.std([1, 2, 3, 6], ddof=1))


def inside(freedom: int, half: float) -> float:
    """Return the mass of Student's distribution between -half and half, from its density."""
    t = np.linspace(-half, half, 200_001)
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    density = math.exp(scale) / math.sqrt(freedom * math.pi)
    heights = density * (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
    return float(np.sum((heights[1:] + heights[:-1]) / 2) * (t[1] - t[0]))


@pytest.mark.parametrize("freedom", [*range(1, 33), 50, 100, 10_000])
def test_quantiles_of_student_hold_95_percent(freedom: int) -> None:
    assert inside(freedom, student_t95(freedom)) == pytest.approx(0.95, abs=1e-4)


def test_ratio_is_taken_within_pairs() -> None:
    """A slow repetition slows both sides: the ratio does not change."""
    found = ratio([10.0, 200.0, 30.0], [5.0, 100.0, 15.0])
    assert found.value == pytest.approx(2) and found.low == pytest.approx(2)
    assert found.high == pytest.approx(2) and found.pairs == 3


def test_ratio_and_its_inverse_are_one_measurement() -> None:
    a, b = [1.0, 1.3, 1.1, 0.9], [1.2, 1.0, 1.4, 1.3]
    there, back = ratio(a, b), ratio(b, a)
    assert there.low is not None and back.high is not None
    assert there.value == pytest.approx(1 / back.value) and there.low == pytest.approx(
        1 / back.high
    )


def test_interval_of_the_mean_logarithm() -> None:
    a, b = [1.0, 1.3, 1.1, 0.9], [1.2, 1.0, 1.4, 1.3]
    logs = np.log(np.array(a) / b)
    half = 3.182 * logs.std(ddof=1) / 2  # 3 degrees of freedom, √4 pairs
    found = ratio(a, b)
    assert found.value == pytest.approx(math.exp(logs.mean()))
    assert found.low == pytest.approx(math.exp(logs.mean() - half))
    assert found.high == pytest.approx(math.exp(logs.mean() + half))


def test_one_pair_has_no_interval() -> None:
    found = ratio([2.0], [1.0])
    assert (found.value, found.low, found.high) == (2.0, None, None)


# -- measuring with a manual clock ----------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """Reads a token in 1 ms, steps in `step` seconds, samples in 0.5 ms."""

    def __init__(self, clock: Clock, step: float = 0.010) -> None:
        self.clock, self.step_s = clock, step
        self.fed: list[int] = []
        self.log: list[str] = []

    def clear(self) -> None:
        self.fed = []

    def feed(self, tokens: Sequence[int]) -> None:
        self.clock.now += 0.001 * len(tokens)
        self.fed += tokens
        self.log.append(f"feed {len(tokens)}")

    def step(self, token: int) -> None:
        self.clock.now += self.step_s
        self.fed.append(token)

    def sample(self) -> int:
        self.clock.now += 0.0005
        return len(self.fed)

    def mark(self) -> Any:
        return list(self.fed)

    def restore(self, mark: Any) -> None:
        self.fed = list(mark)
        self.log.append(f"at {len(mark)}")


def test_sample_of_an_answer() -> None:
    clock = Clock()
    sample = answer(Fake(clock), range(20), 5, clock)
    assert sample.prompt_s == pytest.approx(0.020)
    assert sample.ttft == pytest.approx(0.0205)
    assert sample.gaps == pytest.approx([0.0105] * 4)
    assert sample.tpot == pytest.approx(0.0105)
    assert sample.ttlt == pytest.approx(0.0205 + 4 * 0.0105)
    assert sample.sampling_s == pytest.approx(5 * 0.0005)
    assert sample.prefill_rate == pytest.approx(1000)
    assert sample.decode_rate == pytest.approx(1 / 0.0105)


def test_one_token_has_no_time_per_later_token() -> None:
    clock = Clock()
    sample = answer(Fake(clock), range(3), 1, clock)
    assert sample.tpot is None and sample.decode_rate is None and sample.gaps == ()
    assert sample.to_dict()["tpot_ms"] is None


def test_time_per_token_is_a_mean_and_gaps_are_not() -> None:
    sample = Sample(10, 0.0, 0.1, (0.1, 0.2, 0.9), 0.0)
    assert sample.tpot == pytest.approx(0.4) and sample.gaps == pytest.approx((0.1, 0.7))


def test_runners_take_turns_and_warming_up_does_not_count() -> None:
    clock, order = Clock(), []
    runners = {name: Fake(clock) for name in ("a", "b")}
    for name, runner in runners.items():
        runner.log = order  # type: ignore[assignment]
        runner.feed = lambda tokens, name=name: order.append((name, len(tokens)))  # type: ignore[method-assign, misc]
    plan = AnswerPlan(((1, 2), (1, 2, 3)), generated=2, repetitions=2, warmup=1)
    found = answers(runners, plan, clock, lambda text: None, pause=0)
    assert {n: [len(s) for s in rows] for n, rows in found.items()} == {"a": [2, 2], "b": [2, 2]}
    assert order == [
        ("b", 2), ("a", 2), ("b", 3), ("a", 3),
        ("a", 2), ("b", 2), ("a", 3), ("b", 3),
        ("b", 2), ("a", 2), ("b", 3), ("a", 3),
    ]  # fmt: skip


def test_depths_read_the_context_once() -> None:
    clock = Clock()
    fake = Fake(clock)
    plan = AnswerPlan(((1,),), 2, 2, 0, context=tuple(range(50)), depths=(10, 50), steps=3)
    (rows,) = depths({"a": fake}, plan, clock, lambda text: None).values()
    assert fake.log == ["feed 10", "feed 40", "at 10", "at 50", "at 50", "at 10"]
    assert [row.context for row in rows] == [10, 50]
    assert [row.prefill_s for row in rows] == pytest.approx([0.010, 0.050])
    assert all(row.step_s == pytest.approx([0.0105] * 6) for row in rows)


def test_everyone_begins_once() -> None:
    assert [in_turn("abc", n)[0] for n in range(3)] == ["a", "b", "c"]
    assert sorted(in_turn("abc", 2)) == ["a", "b", "c"]
