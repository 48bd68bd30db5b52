"""Damaged or hostile plans are refused before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edge.errors import BundleError
from edge.export.quantize.plan import StateType
from edge.launch import LaunchPlan, Program, Size
from edge.launch_checks import GRID, check_plan, check_sizes
from edge.plugins.lowering.context import Constant, Lowering, Regime, Tables
from tests import lowered_models
from tests.engine_models import CONFIGS

# layers: Mamba-2 (d_ssm 24, 3 heads of [8, 8]), attention (2 KV heads of 6, rope 4), MLP, Mamba-1
CONFIG = CONFIGS["hybrid"]
WEIGHT_BYTES = 4096
SIZES = {"T": 7, "B": 2, "L": 3, "C": 32, "S": 16}
STATES = {"layers.0.conv_state": "int8"}


def made() -> dict[str, Any]:
    """Return a plan with an argument of every kind, as JSON has it, to be changed by the caller."""
    data: dict[str, Any] = json.loads(_json())
    return data


@cache
def _json() -> str:
    tables = Tables()
    at = Lowering(Regime("chain", None), tables, {})
    view = at.new("layers.0.xz", "i8", "TB", 48)
    logits = at.new("logits", "f32", "LB", CONFIG.vocab_size)
    inline = Constant("one.scale", "inline", "f32", (1,), lambda: np.ones(1, np.float32))
    at.launch(
        "scan.scan",
        {
            "x": at.pointer(view.columns(16, 32)),
            "scale": at.pointer(inline),
            "state": at.state("layers.0.conv_state", "i8"),
            "ssm": at.state("layers.3.ssm_state", "f32"),
            "keys": at.cache("layers.1.key_cache", "f32"),
            "log": at.log("layers.0.conv_state", "conv_in", "i8", 40),
            "dt": at.log("layers.0.ssm_state", "scan_dt", "f32", 3),
            "run": at.run(),
            "taps": at.input("taps4", "i32", Size(times=4, of="T")),
            "cos": at.input("rope0.cos", "f32", Size(times=2, of="T")),
            "tokens": at.size("TB"),
        },
        {"BLOCK": 64},
        (Size(of="TB"), Size(times=3, of="B")),
        settles=True,
    )
    at.launch("head.head", {"y": at.pointer(logits), "eps": (1e-5, "fp32")}, {}, (Size(of="LB"),))
    plan = LaunchPlan(
        variants=tuple(v for _, v in tables.variants.values()),
        launches=tuple(one for _, one in tables.launches.values()),
        programs=(
            Program(kind="chain", max_rows=None, launches=(0, 1)),
            Program(kind="settle", max_rows=None, launches=(0,)),
        ),
        values=tables.values,
        inputs=tables.inputs,
        weights={},
        inline=tables.inline,
        logs=tables.logs,
        taps=(4,),
        rotations=((10000.0, 4),),
    )
    data = plan.model_dump(mode="json")
    data["weights"]["w"] = {"dtype": "f16", "offset": 64, "elements": 128}
    data["launches"][1]["arguments"].append({"space": "weight", "name": "w", "at": 16})
    data["variants"][1]["arguments"].append("weight")
    data["variants"][1]["types"].append("*fp16:16")
    return json.dumps(data)


def judge(data: dict[str, Any]) -> LaunchPlan:
    plan = LaunchPlan.model_validate(data)
    check_plan(plan, CONFIG, weight_bytes=WEIGHT_BYTES, state_dtypes=STATES)
    for program in plan.programs:
        check_sizes(plan, program, {**SIZES, "T": 0} if program.kind == "settle" else SIZES)
    return plan


def test_a_sound_plan_passes() -> None:
    judge(made())


@pytest.mark.parametrize("name, quant, state", lowered_models.CASES)
def test_what_we_lower_passes(name: str, quant: str, state: StateType | None) -> None:
    made = lowered_models.model(name, quant, state)
    check_plan(
        made.plan, made.config, weight_bytes=made.weight_bytes, state_dtypes=made.state_dtypes
    )
    for program in made.plan.programs:
        for batch, tokens in ((1, 1), (3, 5), (2, 1024), (1, 0)):
            sizes = {"T": tokens, "B": batch, "L": min(1, tokens), "C": 4096, "S": 32}
            check_sizes(made.plan, program, sizes)


def argument(data: dict[str, Any], name: str) -> dict[str, Any]:
    for launch in data["launches"]:
        names = data["variants"][launch["variant"]]["arguments"]
        if name in names:
            found: dict[str, Any] = launch["arguments"][names.index(name)]
            return found
    raise KeyError(name)


def pointed(what: str, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: argument(data, what).update(changes)


def typed(name: str, kind: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for variant in data["variants"]:
            if name in variant["arguments"]:
                variant["types"][variant["arguments"].index(name)] = kind

    return change


def entry(where: str, name: str, /, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data[where].setdefault(name, {}).update(changes)


def grid(axis: int, **size: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["launches"][0]["grid"].__setitem__(axis, size)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "weights beyond the file": (entry("weights", "w", offset=3968), "weights.w"),
    "weights far beyond it": (entry("weights", "w", offset=1 << 47, elements=1 << 47), "weights.w"),
    "weights between two values": (entry("weights", "w", offset=63), "weights.w"),
    "half a number": (entry("inline", "one.scale", data="00000000ff"), "inline.one.scale"),
    "no such state": (pointed("ssm", name="layers.2.ssm_state"), "launches.0.ssm"),
    "a state as a cache": (pointed("keys", name="layers.3.ssm_state"), "launches.0.keys"),
    "a state of another type": (typed("state", "*fp32"), "launches.0.state"),
    "behind a state": (pointed("ssm", at=1 << 40), "launches.0.ssm"),
    "behind a weight": (pointed("weight", at=128), "launches.1.weight"),
    "behind a constant": (pointed("scale", at=1), "launches.0.scale"),
    "behind a value": (pointed("x", at=48 * 14), "launches.0.x"),
    "behind an input": (pointed("run", at=8), "launches.0.run"),
    "behind a log": (pointed("log", at=1 << 30), "launches.0.log"),
    "not on 16 bytes": (pointed("x", at=17), "launches.0.x"),
    "a weight not on 16 bytes": (entry("weights", "w", offset=66), "launches.1.weight"),
    "floats as halves": (typed("weight", "*fp32"), "launches.1.weight"),
    "a pointer for a number": (typed("x", "i32"), "launches.0.x"),
    "a number for a pointer": (typed("tokens", "*i32"), "launches.0.tokens"),
    "a type that is none": (typed("x", "*bf16"), "launches.0.x"),
    "an unknown input": (entry("inputs", "secret", dtype="i32", elements={"of": "T"}),
                         "inputs.secret"),
    "an input of another size": (entry("inputs", "run", elements={"times": 1 << 40}),
                                 "inputs.run"),
    "taps of no convolution": (lambda data: data.update(taps=[4, 9]), "taps"),
    "angles of no rotation": (lambda data: data.update(rotations=[[1e4, 1 << 40]]), "rotations"),
    "another theta": (lambda data: data.update(rotations=[[2e4, 4]]), "rotations"),
    "a log that is too wide": (entry("logs", "layers.0.conv_in", width=41),
                               "logs.layers.0.conv_in"),
    "a log of an MLP": (entry("logs", "layers.2.conv_in", dtype="f32", width=20),
                        "logs.layers.2.conv_in"),
    "other logits": (entry("values", "logits", elements={"times": 41, "of": "LB"}),
                     "values.logits"),
    "a program without logits": (lambda data: data["programs"][0].update(launches=[0]),
                                 "programs.0"),
    "no program for long runs": (lambda data: data["programs"][0].update(max_rows=16), "programs"),
    "a wide grid": (grid(0, times=1 << 31), "launches.0.grid.x"),
    "a deep grid": (grid(2, times=65536), "launches.0.grid.z"),
    "a large integer": (pointed("tokens", times=1 << 40), "launches.0.tokens"),
    "a huge value": (entry("values", "layers.0.xz", elements={"times": 1 << 40, "of": "TB"}),
                     "values.layers.0.xz"),
    "a constant beyond reason": (
        lambda data: data["variants"][0]["constants"].update(BLOCK=1 << 40),
        "variants.0.constants.BLOCK"),
    "a parameter twice": (lambda data: data["variants"][0]["constants"].update(x=None),
                          "variants.0"),
    "programs without end": (lambda data: data["programs"].extend(data["programs"][:1] * 100),
                             "programs"),
    "a program without end": (lambda data: data["programs"][0].update(launches=[0, 1] * 40000),
                              "programs.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_where_it_is(name: str) -> None:
    change, field = REFUSED[name]
    data = made()
    change(data)
    with pytest.raises(BundleError) as refused:
        judge(data)
    assert refused.value.field == field
    assert refused.value.remedy


def leaves(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the paths of everything inside."""
    if not isinstance(data, dict | list):
        return [path]
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return [path, *(p for key, value in items for p in leaves(value, (*path, key)))]


PATHS = leaves(made())[1:]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 1 << 60), st.floats(), st.text(max_size=8),
    st.sampled_from(["logits", "run", "layers.0.conv_state", "TTTT", "*i8", "*fp32:16", "f32"]),
    st.lists(st.integers(-1, 9), max_size=3), st.just({}),
)  # fmt: skip


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(PATHS), JUNK), min_size=1, max_size=3))
def test_damage_of_any_kind_is_refused_or_harmless(changes: list[tuple[Any, Any]]) -> None:
    data = made()
    for path, junk in changes:
        holder = data
        try:
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = junk
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change removed the target of this one
    try:
        plan = judge(data)
    except (BundleError, ValidationError):
        return
    for weight in plan.weights.values():
        assert weight.offset + weight.elements <= WEIGHT_BYTES
    for index in plan.programs[0].launches:
        counts = [size.value(SIZES) for size in plan.launches[index].grid]
        assert all(n <= most for n, most in zip(counts, GRID, strict=True))


def test_all_faults_are_told_at_once() -> None:
    data = made()
    for change in (
        pointed("keys", name="other"),
        pointed("state", name="other"),
        typed("y", "*i8"),
    ):
        change(data)
    data["logs"]["layers.0.conv_in"]["width"] = 7
    with pytest.raises(BundleError) as caught:
        judge(data)
    assert caught.value.field == "logs.layers.0.conv_in"
    for fault in ("7 wide", "no cache 'other'", "no state 'other'", "which is f32, as *i8"):
        assert fault in caught.value.message
    data = made()
    data["launches"][0]["variant"] = 99
    data["programs"][1]["launches"] = [5]
    with pytest.raises(ValidationError, match=r"unknown variant 99; programs\[1\]: names a launch"):
        LaunchPlan.model_validate(data)
