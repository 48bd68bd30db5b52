"""Break down the time of a run on the `cpu` engine, by timing each call of a kernel."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

from edge.apps.info.launches import layer_of
from edge.apps.measure.run_cost import RunCost, RunKind, along, runs
from edge.bundle import open_bundle
from edge.launch import LOGITS, Launch, Pointer
from edge.plugins.cpu.library import CpuCall
from edge.runtime.cpu.device import CpuDevice, Pool
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.runs import choose_program


class TimedCall(NamedTuple):
    """Start and end of one call of the kernel with handle `kernel`, in nanoseconds."""

    kernel: int
    start: int
    end: int


class TimedPool(Pool):
    """A pool that runs calls one by one and records the time of each.

    Attributes:
        calls: calls since the list was last cleared.
    """

    def __init__(self, threads: int, *, pin: bool) -> None:
        super().__init__(threads, pin=pin)
        self.calls: list[TimedCall] = []

    def run(self, calls: ctypes.Array[CpuCall]) -> None:
        for call in calls:
            start = perf_counter_ns()
            super().run((CpuCall * 1)(call))
            self.calls.append(TimedCall(call.kernel, start, perf_counter_ns()))


def breakdown(
    bundle: Path, threads: int | None, kinds: Mapping[str, RunKind], *, pin: bool = False
) -> dict[str, RunCost]:
    """Profile each kind of run on the engine that a session uses; see `ort_profile.breakdown`.

    Raises BundleError, EngineError.
    """
    with open_bundle(bundle) as opened:
        engine = CpuEngine.from_bundle(opened, threads=threads, pin=pin)
        recipe = opened.manifest.quantization.recipe
    device = engine.exclusive.device
    assert isinstance(device, CpuDevice)
    pool = device.pool = TimedPool(device.pool.threads, pin=pin)
    costs = {}
    for name, kind in kinds.items():
        samples = []
        for tokens in runs(engine, kind):
            samples.append((tokens, list(pool.calls)))
            pool.calls.clear()
        tokens, best = min(samples[1:], key=lambda run: run[1][-1].end - run[1][0].start)
        costs[name] = _cost(f"{recipe} {name}, one run of {tokens}", engine, best, tokens)
    return costs


def _cost(title: str, engine: CpuEngine, calls: Sequence[TimedCall], tokens: int) -> RunCost:
    """Sum up the calls of one run: launches in the program's order, with copies between them."""
    assert isinstance(engine.executor, PlanExecutor)
    plan, kernels = engine.plan, engine.executor.kernels
    names = {kernel.handle: plan.variants[n].kernel for n, (kernel, _) in kernels.items()}
    ops: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for call in calls:
        name = names.get(call.kernel, "copy")
        ops[name] += _ms(call)
        counts[name] += 1
    program = choose_program(plan, "chain", tokens)
    assert program is not None
    launches = [plan.launches[index] for index in plan.programs[program].launches]
    parts: dict[str, float] = defaultdict(float)
    layers: dict[str, float] = defaultdict(float)
    launched = [call for call in calls if call.kernel in names]
    for call, launch in zip(launched, launches, strict=True):
        parts[names[call.kernel].partition(".")[0]] += _ms(call)
        layers[_layer(launch)] += _ms(call)
    return RunCost(
        title,
        (calls[-1].end - calls[0].start) / 1e6,
        {name: (spent, counts[name]) for name, spent in ops.items()},
        dict(parts),
        {name: layers[name] for name in sorted(layers, key=along)},
    )


def _ms(call: TimedCall) -> float:
    return (call.end - call.start) / 1e6


def _layer(launch: Launch) -> str:
    """Return `layer N`, `embedding`, `head`, or `once` for launches that serve all layers."""
    if (layer := layer_of(launch)) is not None:
        return f"layer {layer}"
    names = [argument.name for argument in launch.arguments if isinstance(argument, Pointer)]
    if any(name == LOGITS or name.startswith(("norm_f", "lm_head")) for name in names):
        return "head"
    return "embedding" if any(name.startswith("embed") for name in names) else "once"
