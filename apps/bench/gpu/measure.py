"""Times of an engine and of its kernels, on the wall clock: every run ends with a wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from edge.launch import ITEM_SIZE, LaunchPlan, Pointer
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.state import DeviceState

WARM, REPEATS = 5, 40


@dataclass(frozen=True)
class Times:
    """Milliseconds, medians.

    Attributes:
        tpot: a step as sessions take it: it can be taken back, so a window of tokens is replayed.
        committed: a step that cannot.
        verify: K → a run of K + 1 tokens whose logits are all wanted.
        ttft: prompt length → reading it and the logits after it.
        launches: of a step.
        memory: bytes by purpose (`Engine.memory_plan`).
    """

    tpot: float
    committed: float
    verify: dict[int, float]
    ttft: dict[int, float]
    launches: int
    memory: dict[str, int]


@dataclass(frozen=True)
class KernelTime:
    """One kernel over all the layers it is launched for in a step.

    Attributes:
        launches: how many. ms: all of them, issued as one graph.
        weight_bytes: what they read of the weights; the layers follow one another, so a cache
            smaller than that holds none of it.
    """

    kernel: str
    launches: int
    ms: float
    weight_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / (self.ms / 1000)


def median_ms(work: Callable[[], object], repeats: int = REPEATS, warm: int = WARM) -> float:
    """Of `repeats` calls, after `warm` ones that are not counted."""
    for _ in range(warm):
        work()
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return 1000 * statistics.median(spent)


def times(
    engine: CudaEngine,
    prompts: tuple[int, ...],
    drafts: tuple[int, ...],
    repeats: int = REPEATS,
    warm: int = WARM,
) -> Times:
    """Of one sequence, with room for the longest draft to be taken back."""
    state = engine.new_state(window=max(drafts) + 1, capacity=max(prompts) + 64)
    vocab = engine.config.vocab_size
    tokens = np.random.default_rng(3).integers(0, vocab, (1, max(*prompts, max(drafts) + 1)))
    engine.run(tokens[:, :8], state, commit=True)

    def run(count: int) -> None:
        engine.run(tokens[:, :count], state, rows="all")
        state.rewind(count)

    tpot = median_ms(lambda: engine.run(tokens[:, :1], state), repeats, warm)
    committed = median_ms(lambda: engine.run(tokens[:, :1], state, commit=True), repeats, warm)
    verify = {k: median_ms(partial(run, k + 1), repeats, warm) for k in drafts}
    few = -(-repeats // 8)
    ttft = {
        n: median_ms(partial(_read, engine, state, tokens[:, :n]), few, warm // 4) for n in prompts
    }
    plan = engine.memory_plan(window=max(drafts) + 1, capacity=max(prompts) + 64)
    return Times(tpot, committed, verify, ttft, len(step_launches(engine.plan)), plan)


def _read(engine: CudaEngine, state: DeviceState, tokens: np.ndarray) -> None:
    state.clear()
    for start in range(0, tokens.shape[1], engine.chunk):
        engine.run(tokens[:, start : start + engine.chunk], state, commit=True)


def step_launches(plan: LaunchPlan) -> tuple[int, ...]:
    """Launches of one step of one sequence."""
    chains = [program for program in plan.programs if program.kind == "chain"]
    return chains[0].launches


def kernel_times(
    engine: CudaEngine, repeats: int = REPEATS, warm: int = WARM, tokens: int = 1
) -> list[KernelTime]:
    """Each kernel of a run alone, all its layers in one graph; the slowest first.

    `tokens` 1 is a step, more is that many tokens of a prompt.
    """
    state = engine.new_state(window=8)
    engine.run(np.zeros((1, tokens), np.int64), state, commit=True)
    key = state.workspace.runs.key("chain", tokens, 1)
    calls, plan = state.workspace.calls(key), engine.plan
    order = plan.programs[key.program].launches
    groups: dict[int, list[int]] = {}
    for place, index in enumerate(order):
        groups.setdefault(plan.launches[index].variant, []).append(place)
    found = []
    with engine.exclusive as device:
        for variant, places in groups.items():
            with device.record() as graphs:
                for place in places:
                    calls[place].issue(device)
            graph = graphs[0]

            def work(graph=graph) -> None:  # type: ignore[no-untyped-def]
                graph.replay()
                device.wait()

            size = sum(_weight_bytes(plan, order[place]) for place in places)
            name = plan.variants[variant].kernel
            found.append(KernelTime(name, len(places), median_ms(work, repeats, warm), size))
    return sorted(found, key=lambda one: -one.ms)


def _weight_bytes(plan: LaunchPlan, launch: int) -> int:
    one = plan.launches[launch]
    if plan.variants[one.variant].kernel.startswith("embed"):
        return 0  # it reads a row of the table
    names = {a.name for a in one.arguments if isinstance(a, Pointer) and a.space == "weight"}
    return sum(plan.weights[name].elements * ITEM_SIZE[plan.weights[name].dtype] for name in names)
