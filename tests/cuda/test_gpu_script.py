"""The logic of `tests/gpu/run.sh`, through the interpreter: what a GPU would be asked."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from edge.apps.bench.gpu.check import agreement
from edge.apps.bench.gpu.measure import copy_bytes_per_s, kernel_times, times
from edge.apps.bench.gpu.random_model import write_bundle
from edge.apps.bench.gpu.report import Case, Report
from edge.apps.bench.gpu.shapes import MODELS, period
from edge.bundle import open_bundle
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime.cuda.engine import CudaEngine
from tests.gpu.first_cubin import lowered, runs

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.sh"


def test_the_first_kernel_is_judged_by_its_numbers() -> None:
    device = InterpretDevice()
    variant, grid = lowered()
    assert runs(device, device.load(variant, None, b""), variant, grid)


def test_the_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("model", "quant"), [("tiny-mamba", "w8a8"), ("tiny-mamba2", "w8a8"), ("tiny-hybrid", "fp16")]
)
def test_models_are_checked_and_then_measured(model: str, quant: str, tmp_path: Path) -> None:
    config = MODELS[model]
    device = InterpretDevice()
    whole = config.model_copy(
        update={"layers": config.layers * (1 if len(config.layers) > 2 else 2)}
    )
    assert period(whole) <= len(whole.layers)
    short = write_bundle(config, quant, tmp_path / "short", chunk=32)
    found = agreement(short, quant, device)
    assert found.right, found.line()
    with open_bundle(write_bundle(whole, quant, tmp_path / "whole", chunk=32)) as bundle:
        engine = CudaEngine.from_bundle(bundle, device=device)
    case = Case(model, quant, found, engine.weights.nbytes)
    case.times = times(engine, (5,), (1,), repeats=1, warm=0)
    case.kernels = kernel_times(engine, repeats=1, warm=0)
    assert sum(kernel.launches for kernel in case.kernels) == case.times.launches
    assert any(kernel.weight_bytes for kernel in case.kernels)
    report = Report({"device": "interpreter"}, copy_bytes_per_s(device, 1 << 12, 2), [case])
    text = report.to_markdown()
    assert f"| {model} | {quant} | right: KL" in text
    assert text.count("\n| ") >= 2 + len(case.kernels)
