"""The report from given samples, power readings and machine conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from edge.apps.measure import table
from edge.apps.measure.machine import Conditions
from edge.apps.measure.power import PowerLog, PowerSource, Unit
from edge.apps.measure.roofline import Roof
from edge.apps.measure.run_cost import RunCost
from edge.apps.profile import page, report, words
from edge.apps.profile.answers import AnswerPlan, Depth, Sample
from edge.apps.profile.run import OTHER, THIS, ProfileRequest, ProfileResult, ProfileSide
from tests.facts import says
from tests.session_models import bundle

COOL = Conditions((1500.0,), {"cpu": 40.0}, {"cpu0 core": 1})
HOT = Conditions((900.0,), {"cpu": 95.0}, {"cpu0 core": 4})


def sample(began: float, step: float = 0.1) -> Sample:
    """Ten tokens of prompt in a second, then eleven tokens."""
    return Sample(10, began, 1.0, tuple(1.0 + step * i for i in range(11)), 0.001)


def side(name: str, step: float = 0.1) -> ProfileSide:
    memory = {"peak": 5_000_000, "anonymous": 3_000_000, "file": 2_000_000,
              "program": {"total": 1_000_000}, "peak_restarted": True}  # fmt: skip
    facts = {
        "bundle": str(bundle(name)), "fingerprint": name, "family": "mamba", "quantization": "w8",
        "parameters": 1_000_000, "weight_bytes": 1_000_000, "engine": "ort", "provider": "cpu",
        "threads": 2,
        "spin": False, "pin": False, "chunk": 4, "state_bytes": 500, "kv_cache_bytes": 0,
        "kv_cache_tokens": None, "peak_memory_bytes": 5_000_000, "memory": memory,
    }  # fmt: skip
    cost = RunCost("w8 decode", 10.0, {"MatMul": (8.0, 3)}, {"Linear": 8.0}, {"layer 0": 8.0})
    samples = [sample(0.0, step), sample(10.0, 2 * step)]
    return ProfileSide(facts, None, [samples], [Depth(128, 1.0, (0.1, 0.3))], {"decode": cost})


class Rails:
    """VDD_IN is the total, VDD_SOC a part of it."""

    name = "INA3221"
    unit: Unit = "W"
    whole: tuple[str, ...] = ("VDD_IN",)

    def read(self) -> Mapping[str, float]:
        return {}


def power(seconds: int, period: float = 0.25) -> tuple[PowerSource, PowerLog]:
    log = PowerLog("W")
    for i in range(round(seconds / period) + 1):
        log.add(i * period, {"VDD_IN": 6.0, "VDD_SOC": 1.5})
    return Rails(), log


def result(sides: dict[str, ProfileSide] | None = None, **changes: object) -> ProfileResult:
    values: dict[str, object] = {
        "request": ProfileRequest(str(bundle("base"))),
        "plan": AnswerPlan((tuple(range(10)),), generated=11, repetitions=2, warmup=1),
        "sides": sides or {THIS: side("base")},
        "before": COOL, "after": COOL, "others": 0.02, "logs": [power(20)], "gpu": None,
        "roofs": {"cpu": Roof(read=2e9, copy=1e9, buffer_bytes=1 << 20, flops=1e10)}, "notes": [],
    }  # fmt: skip
    return ProfileResult(**(values | changes))  # type: ignore[arg-type]


def test_figures_are_means_over_repetitions() -> None:
    facts = report.to_dict(result())
    assert facts["ttft_ms"] == pytest.approx(1000) and facts["tpot_ms"] == pytest.approx(150)
    assert facts["ttlt_ms"] == pytest.approx(2500)
    assert facts["itl_ms"]["p50"] == pytest.approx(150) and facts["itl_ms"]["count"] == 20
    assert facts["prefill_tokens_per_s"] == pytest.approx(10)
    # the mean of the rates, not the rate of the mean
    assert facts["decode_tokens_per_s"] == pytest.approx((10 + 5) / 2)
    rate = facts["tests"][0]["decode_tokens_per_s"]
    assert rate["deviation"] == pytest.approx(5 / 2**0.5)
    assert table.plus_minus(rate) == "7.50 ± 3.54"


def test_energy_of_prefill_and_decode() -> None:
    found = report.to_dict(result())["tests"][0]["energy"]["INA3221"]
    assert found["decode"]["watts"] == pytest.approx({"VDD_IN": 6.0, "VDD_SOC": 1.5})
    assert found["decode"]["joules"] == pytest.approx(6.0 * 3)  # parts are not counted beside it
    assert found["decode"]["tokens_per_joule"] == pytest.approx(20 / 18)
    assert found["prefill"]["tokens_per_joule"] == pytest.approx(20 / 12)


def test_energy_of_a_phase_between_two_readings_is_absent() -> None:
    facts = report.to_dict(result(logs=[power(20, period=5.0)]))
    assert facts["tests"][0]["energy"] is None
    assert says(facts["absent"]["energy of decode, INA3221"], "3000 ms", "2 turns", "short")


def test_roofline_of_a_step_and_a_chunk() -> None:
    runs = report.to_dict(result())["roofline"]["runs"]
    step, chunk = runs["decode"], runs["prefill"]
    assert step["bound_ms"] == pytest.approx(1e3 * step["bytes"] / 2e9)
    assert step["share_of_bandwidth"] == pytest.approx(step["bound_ms"] / step["ms"])
    assert (chunk["tokens"], chunk["ms"]) == (4, pytest.approx(400))  # of ten tokens in a second
    assert chunk["flops_per_byte"] > step["flops_per_byte"]


def test_ratio_is_this_over_the_other() -> None:
    facts = report.to_dict(result({THIS: side("base"), OTHER: side("chat", step=0.05)}))
    (row,) = facts["ratio"]
    assert row["tpot"]["value"] == pytest.approx(2) and row["ttft"]["value"] == pytest.approx(1)
    assert row["tpot"]["low"] == pytest.approx(2) == row["tpot"]["high"]


def test_a_wide_interval_is_called_what_it_is() -> None:
    facts = report.to_dict(result({THIS: side("base"), OTHER: side("chat", step=0.05)}))
    facts["ratio"][0]["ttft"] |= {"low": 0.0, "high": 156478244.0}
    said = {row[0]: row[3] for row in words.ratios(facts).rows}
    assert said["TTFT"] == "too few repetitions (-r, now 2)"
    assert said["TPOT"] == "2.000 to 2.000"


def test_sides_of_one_bundle_are_told_apart_by_what_ran_them() -> None:
    other = side("base")
    other.facts |= {"engine": "cpu", "provider": None}
    facts = report.to_dict(result({THIS: side("base"), OTHER: other}))
    assert (facts["name"], facts["against"]["name"]) == ("base w8 ort cpu", "base w8 cpu")


def test_only_what_was_printed_is_defined() -> None:
    def defined(measured: ProfileResult) -> set[str]:
        facts = report.to_dict(measured)
        return {name for name in facts["definitions"] if f"\n{name}: " in said(facts)}

    def said(facts: Mapping[str, object]) -> str:
        return "\n".join(words.lines(facts))

    bare = side("base")
    bare.depths, bare.costs = [], {}
    missing = {"context", "ratio", "breakdown", "roofline", "drafting", "energy"}
    assert report.DEFINITIONS.keys() - defined(result({THIS: bare}, roofs={}, logs=[])) == missing
    assert report.DEFINITIONS.keys() - defined(result()) == {"ratio", "drafting"}


def test_warnings_of_a_busy_and_a_hot_machine() -> None:
    facts = report.to_dict(result(others=0.4, after=HOT))
    assert facts["machine"]["throttled"] == ["cpu0 core"]
    assert not facts["machine"]["trustworthy"]
    busy, hot = facts["warnings"]
    assert "40%" in busy and "cpu0 core" in hot
    assert facts["machine"]["after"] == {
        "clock_mhz": {"min": 900.0, "max": 900.0}, "temperature_c": {"cpu": 95.0}}  # fmt: skip
    quiet = report.to_dict(result())
    assert quiet["warnings"] == [] and quiet["machine"]["throttled"] == []
    assert not {"temperature", "throttling", "clock"} & quiet["absent"].keys()


@pytest.mark.parametrize("several", [False, True])
def test_everything_is_said_in_words_and_on_the_page(several: bool) -> None:
    sides = {THIS: side("base")} | ({OTHER: side("chat")} if several else {})
    measured = result(sides, others=0.4, after=HOT, notes=["a note"])
    facts = json.loads(json.dumps(report.to_dict(measured), allow_nan=False))
    said = "\n".join(words.lines(facts))
    for wanted in (
        "energy  decode @ 10, INA3221: VDD_IN 6.00 W, VDD_SOC 1.50 W; 1.11 tokens per joule",
        "temperature cpu 95 °C, throttled cpu0 core", "note  a note", "warning  other programs",
        "memory  base w8: at most 5 MB", "layers: layer 0 8.000", "absent  gpu: no NVIDIA driver",
    ):  # fmt: skip
        assert wanted in said, wanted
    html = page.render(facts, measured)
    assert html.count('class="warning"') == 2 and "energy  decode" in html
    assert ("chat w8" in html) == several


def test_page_of_what_was_not_measured() -> None:
    bare = side("base")
    bare.samples = [[Sample(10, 0.0, 1.0, (1.1,), 0.1)]]
    bare.depths, bare.costs, bare.facts["peak_memory_bytes"] = [], {}, None
    bare.facts["memory"] = None
    measured = result({THIS: bare}, roofs={}, logs=[])
    html = page.render(report.to_dict(measured), measured)
    assert "<svg" not in html and html.count("absent") > 5
