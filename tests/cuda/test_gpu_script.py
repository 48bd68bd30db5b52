"""The logic of `tests/gpu/run.sh`, through the interpreter: what a GPU would be asked to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from edge.apps.bench.gpu.measure import (
    check,
    kernel_times,
    share_of_best,
    step_launches,
    times,
)
from edge.apps.bench.gpu.report import GpuCase, GpuReport
from edge.apps.bench.models import MODELS, period, write_bundle
from edge.apps.measure.roofline import device_roof
from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.launch import PROGRAMS
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda.inputs import DeviceRun
from edge.runtime.cuda.opening import from_bundle
from tests.gpu.first_cubin import lowered, runs

pytestmark = pytest.mark.without_gpu

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.sh"


def test_the_first_kernel_is_judged_by_its_numbers() -> None:
    device = InterpretDevice()
    variant, grid = lowered()
    assert runs(device, device.load(variant, None, b""), variant, grid)


def test_the_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


class Wide(InterpretDevice):
    """A device with room for many programs, so that Mamba-1's prompt runs in parts."""

    multiprocessors = 132


@pytest.mark.parametrize(
    ("model", "quant", "prompt"),
    [("tiny-mamba", "w8a8", 66), ("tiny-mamba2", "fp16", 19), ("tiny-deltanet", "fp16", 9)],
)
def test_models_are_checked_and_then_measured(
    model: str, quant: str, prompt: int, tmp_path: Path
) -> None:
    device, config = Wide(), MODELS[model]
    last = config.layers[-4:]  # have every kind of layer that the model has
    assert set(map(type, last)) == set(map(type, config.layers))
    short = config.model_copy(update={"layers": last})
    bundle = write_bundle(short, quant, tmp_path / "short", chunk=72)
    found = check(bundle, quant, device, prompt)
    assert found.right, found.line()
    with open_bundle(bundle) as opened:
        engine = from_bundle(opened, device)
    fields = np.zeros(8, np.int32)
    step = engine.new_state(window=1).ledger.run(1)
    engine.sources.fill({"run": fields}, DeviceRun(np.zeros((1, 1), np.int64), step, (0,)))
    assert fields[PROGRAMS] >= 132, "kernels are not told how much room there is"
    case = GpuCase(model, quant, found, engine.executor.weights_bytes)
    case.times = times(engine, (2,), (1,), repeats=1, warm=0)
    case.kernels = kernel_times(engine, repeats=1, warm=0)
    assert sum(kernel.launches for kernel in case.kernels) == case.times.launches
    assert any(kernel.weight_bytes for kernel in case.kernels)
    report = GpuReport({"device": "interpreter"}, device_roof(device, 1 << 12).copy, [case])
    text = report.to_markdown()
    assert f"| {model} | {quant} | right: KL" in text
    assert text.count("\n| ") >= 2 + len(case.kernels)


@pytest.mark.parametrize("name", MODELS)
def test_a_models_layers_repeat(name: str) -> None:
    """A whole model repeats one period of its layers, with a plan of the same kind."""
    config = MODELS[name]
    size = period(config)
    assert config.layers == config.layers[:size] * (len(config.layers) // size)


def test_a_deeper_model_has_the_layers_of_the_short_one(tmp_path: Path) -> None:
    config = MODELS["tiny-mamba"]
    deep = config.model_copy(update={"layers": config.layers * 2})
    kinds = []
    for number, each in enumerate((config, deep)):
        path = write_bundle(each, "w8a8", tmp_path / str(number), chunk=32)
        with open_bundle(path) as bundle:
            plan = open_plan(bundle)
        kinds.append([plan.variants[plan.launches[i].variant].key for i in step_launches(plan)])
    first, last = kinds
    # embedding, layers, head: the layers appear twice
    assert len(last) - len(first) == 2 * 6
    assert set(last) == set(first)


def test_only_near_ties_count_as_the_best_token() -> None:
    expected = np.zeros((2, 100), np.float32)
    expected[:, :50] = 1.0  # a spread of 0.5
    expected[:, 7] = 1.5
    expected[:, 8] = 1.46
    far, near = expected.copy(), expected.copy()
    near[0, 8], far[0, 9] = 2.0, 2.0
    assert (share_of_best(expected, near), share_of_best(expected, far)) == (1.0, 0.5)
