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
from edge.apps.bench.gpu.check import agreement
from edge.apps.bench.gpu.measure import copy_bytes_per_s, kernel_times, times
from edge.apps.bench.gpu.random_model import write_bundle
from edge.apps.bench.gpu.report import Case, Report
from edge.apps.bench.gpu.shapes import DEFAULT, MODELS, model_named, period
from edge.apps.exits import REFUSED, exit_code_of
from edge.bundle import open_bundle
from edge.config import ModelConfig
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.opening import open_device

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
RECIPES = ("w8a8", "fp16")
DRAFTS = tuple(range(1, 9))


@app.command()
def gpu(
    models: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = ",".join(DEFAULT),
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "512,1024,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each kind.")] = 40,
    multiprocessors: Annotated[
        int, typer.Option(min=0, help="Use so many SMs alone: a stand-in for a small GPU.")
    ] = 0,
    peers: Annotated[bool, typer.Option(help="Measure torch and transformers too.")] = True,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json and OUT.md.")] = None,
) -> None:
    """Correctness first, then TPOT, TTFT, verifying runs, kernels, memory. Exit code 1: wrong."""
    device = _device(multiprocessors)
    lengths = tuple(int(part) for part in prompts.split(","))
    report = Report(_machine(device, multiprocessors), copy_bytes_per_s(device, 1 << 28, repeats))
    with tempfile.TemporaryDirectory(prefix="edge-gpu-") as folder:
        for name in models.split(","):
            for quant in RECIPES:
                _say(f"{name} {quant}")
                case = _case(name, quant, Path(folder), device, lengths, repeats)
                report.cases.append(case)
                _say(f"  {case.agreement.line()}")
            if peers:
                report.peers[name] = _peers(model_named(name), repeats)
    text = report.to_markdown()
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".json").write_text(json.dumps(report.to_dict(), indent=1) + "\n")
        out.with_suffix(".md").write_text(text)
    print(text)
    if not report.right:
        raise typer.Exit(REFUSED)


def _case(
    name: str, quant: str, folder: Path, device: Device, prompts: tuple[int, ...], repeats: int
) -> Case:
    """Check one period of the layers against the reference, then time the whole model."""
    config = model_named(name)
    short = config.model_copy(update={"layers": config.layers[: period(config)]})
    checked = write_bundle(short, quant, folder / f"{name}-{quant}-short", chunk=32)
    case = Case(name, quant, agreement(checked, quant, device))
    if not case.agreement.right:
        return case
    whole = write_bundle(config, quant, folder / f"{name}-{quant}", chunk=max(prompts))
    with open_bundle(whole) as bundle:
        engine = CudaEngine.from_bundle(bundle, device=device)
    case.weight_bytes = engine.weights.nbytes
    case.times = times(engine, prompts, DRAFTS, repeats)
    case.kernels = kernel_times(engine, repeats)
    return case


def _device(multiprocessors: int) -> Device:
    if not multiprocessors:
        return open_device()
    from edge.apps.bench.gpu.green import part_of_gpu

    return part_of_gpu(multiprocessors)


def _peers(config: ModelConfig, repeats: int) -> dict[str, float | str]:
    """Milliseconds of each peer, or why there are none."""
    try:
        from edge.apps.bench.gpu import peers
    except ImportError as problem:
        return {"torch": f"absent: {problem}"}
    if not peers.available():
        return {"torch": "absent: it sees no GPU"}
    work: dict[str, Callable[[], float]] = {
        "torch fp16 network, CUDA graph, one step": lambda: peers.network_step_ms(config, repeats),
        "int8 products of 1024 tokens, cuBLASLt": lambda: peers.products_ms(config, 1024, repeats),
    }
    if config.family == "mamba":
        work["transformers fp16, one step"] = lambda: peers.transformers_step_ms(config, repeats)
    found: dict[str, float | str] = {}
    for name, measured in work.items():
        try:
            found[name] = measured()
        except Exception as problem:  # a peer that fails is reported; it does not end the report
            found[name] = f"failed: {type(problem).__name__}: {problem}"[:200]
    return found


def _machine(device: Device, multiprocessors: int) -> dict[str, str]:
    from importlib import metadata

    facts = {"device": device.name, "sm": str(device.sm), "edge": edge.__version__}
    if multiprocessors:
        facts["stand-in"] = f"{multiprocessors} multiprocessors of it, memory and caches whole"
    facts["host"] = (
        f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    )
    for package in ("cuda-core", "triton", "torch", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "absent"
    return facts


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(exit_code_of(app))
