"""`python -m edge.apps.bench.gpu`: check every model, then measure it."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import edge
from edge.apps.bench.gpu.measure import check, kernel_times, part_of_gpu, times
from edge.apps.bench.gpu.report import GpuCase, GpuReport
from edge.apps.bench.models import DEFAULT, MODELS, model_named, period, write_bundle
from edge.apps.exits import REFUSED, leave
from edge.apps.measure.machine import installed
from edge.apps.measure.roofline import device_roof
from edge.apps.measure.table import ABSENT
from edge.apps.options import numbers
from edge.apps.programs import CommandGroup
from edge.bundle import open_bundle
from edge.config import ModelConfig
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.opening import from_bundle

app = CommandGroup()
RECIPES = ("w8a8", "fp16")
WIDTHS = ("w8", "w4", "w4a8")  # weights in blocks
DRAFTS = tuple(range(1, 9))
PROMPT = 1024  # tokens of the prompt whose kernels are timed one by one


@app.command()
def gpu(
    models: Annotated[str, typer.Option(help=f"Any of {', '.join(MODELS)}.")] = ",".join(DEFAULT),
    recipes: Annotated[
        str, typer.Option(help=f"Any of {', '.join((*RECIPES, *WIDTHS))}.")
    ] = ",".join(RECIPES),
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,1024,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")] = 40,
    multiprocessors: Annotated[
        int, typer.Option(min=0, help="Number of SMs to use, to emulate a small GPU; 0 is all.")
    ] = 0,
    peers: Annotated[bool, typer.Option(help="Measure torch and transformers too.")] = True,
    bundles: Annotated[
        Path | None, typer.Option(help="Folder to keep the models in and to reuse them from.")
    ] = None,
    prepare: Annotated[bool, typer.Option(help="Only write the models; needs no GPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and OUT.md.")] = None,
) -> None:
    """Check results, then measure TPOT, TTFT, verify runs, kernels and memory.

    Exit code 1: a result is wrong. OUT is rewritten after every model, so that results survive if
    the machine is lost.
    """
    lengths = numbers(prompts, int, "--prompts", "512,1024")
    cases = [(name, quant) for name in models.split(",") for quant in recipes.split(",")]
    with tempfile.TemporaryDirectory(prefix="edge-gpu-") as temporary:
        folder = bundles or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if prepare:
            for name, quant in cases:
                _make_bundles(name, quant, folder, max(lengths))
            return
        device = _device(multiprocessors)
        report = GpuReport(_machine(device, multiprocessors), device_roof(device).copy)
        for name, quant in cases:
            _say(f"{name} {quant}")
            case = _measure_case(name, quant, folder, device, lengths, repeats)
            report.cases.append(case)
            _say(f"  {case.agreement.line()}")
            _save(report, out)
        for name in dict.fromkeys(name for name, _ in cases) if peers else ():
            report.peers[name] = _measure_peers(model_named(name, MODELS, "models"), repeats)
            _save(report, out)
    print(report.to_markdown())
    if not report.right:
        raise typer.Exit(REFUSED)


def _save(report: GpuReport, out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
        out.with_suffix(".md").write_text(report.to_markdown())


def _make_bundles(name: str, quant: str, folder: Path, chunk: int) -> tuple[Path, Path]:
    """Return bundles of one period of layers and of the model, written if they do not exist."""
    config = model_named(name, MODELS, "models")
    short = config.model_copy(update={"layers": config.layers[: period(config)]})
    checked, full = folder / f"{name}-{quant}-short", folder / f"{name}-{quant}"
    if not checked.exists():
        write_bundle(short, quant, checked, chunk=128)
    if not full.exists():
        write_bundle(config, quant, full, chunk=chunk)
    return checked, full


def _measure_case(
    name: str, quant: str, folder: Path, device: Device, prompts: tuple[int, ...], repeats: int
) -> GpuCase:
    """Check one period of the layers against the reference, then time the whole model."""
    checked, full = _make_bundles(name, quant, folder, max(prompts))
    case = GpuCase(name, quant, check(checked, quant, device))
    if not case.agreement.right:
        return case
    with open_bundle(full) as bundle:
        engine = from_bundle(bundle, device)
    case.weight_bytes = engine.executor.weights_bytes
    case.times = times(engine, prompts, DRAFTS, repeats)
    case.kernels = kernel_times(engine, repeats)
    prompt = min(PROMPT, max(prompts))
    case.prompt_kernels = kernel_times(engine, max(1, repeats // 8), tokens=prompt)
    return case


def _device(multiprocessors: int) -> CoreDevice:
    """Open the GPU or a part of it. Raises EngineError without a GPU or green contexts."""
    if not multiprocessors:
        return CoreDevice()
    return part_of_gpu(multiprocessors)


def _measure_peers(config: ModelConfig, repeats: int) -> dict[str, float | str]:
    """Return the milliseconds of each peer, or the reason why it was not measured."""
    try:
        from edge.apps.bench.gpu import peers
    except ImportError as problem:
        return {"torch": f"absent: {problem}"}
    if not peers.available():
        return {"torch": "absent: torch sees no GPU"}
    work: dict[str, Callable[[], float]] = {
        "torch fp16 network, CUDA graph, one step": lambda: peers.network_step_ms(config, repeats),
        "int8 products of 1024 tokens, cuBLASLt": lambda: peers.products_ms(config, 1024, repeats),
    }
    if config.family == "mamba":
        work["transformers fp16, one step"] = lambda: peers.transformers_step_ms(config, repeats)
    results: dict[str, float | str] = {}
    for name, measure in work.items():
        try:
            results[name] = measure()
        except Exception as problem:  # a failing peer must not end the report
            results[name] = f"failed: {type(problem).__name__}: {problem}"[:200]
    return results


def _machine(device: Device, multiprocessors: int) -> dict[str, str]:
    facts = {"device": device.name, "sm": str(device.sm), "edge": edge.__version__}
    if multiprocessors:
        facts["stand-in"] = f"{multiprocessors} of its multiprocessors, all memory and caches"
    facts["host"] = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    packages = ("cuda-core", "triton", "torch", "transformers")
    return facts | {package: installed(package) or ABSENT for package in packages}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(app)
