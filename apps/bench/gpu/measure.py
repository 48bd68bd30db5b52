"""Check the CUDA engine's results, then time the engine and its kernels by the wall clock.

Every timed run ends by waiting for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.apps.measure.agreement import Logits, agreement, run_through
from edge.apps.measure.stopwatch import median_ms
from edge.bundle import open_bundle
from edge.errors import EngineError
from edge.export.graph.run import GraphRunner, open_reference
from edge.launch import ITEM_SIZE, LaunchPlan, Pointer
from edge.runtime.cuda.core import CoreDevice
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.opening import from_bundle
from edge.runtime.cuda.state import DeviceState

WARM, REPEATS = 5, 40
SEED = 5
PROMPT, RUN, STEPS = 99, 4, 3  # the prompt is long enough to run in parts
# limits on KL in nats per token and top-1. int8 rounding differs where values are summed in a
# different order, and a flipped value propagates (docs/inside/quantization.md); fp16 products round
# their input
_FLOAT, _INT8 = (1e-4, 0.99), (5e-3, 0.9)
LIMITS = {"w8a8": _INT8, "w4a8": _INT8, "fp16": _FLOAT, "w8": _FLOAT, "w4": _FLOAT}
# tokens whose logits are this near, in spreads, count as the same: random weights have near-ties
# among 50,000 logits, and on a GPU 0.84 to 0.9 of the best tokens were the same at 1e-3 nats
NEAR_TIE = 0.1


@dataclass(frozen=True)
class ModelAgreement:
    """Agreement of the engine with the reference ops on one period of a model's layers.

    Attributes:
        kl: mean of KL(reference ‖ engine) in nats per token.
        top1: share of positions where the engine's best token is the reference's, or a near-tie.
        replay: largest difference of logits between a run after a rewind and the same tokens as
            steps, relative to the spread of the logits.
    """

    kl: float
    top1: float
    replay: float
    right: bool

    def line(self) -> str:
        verdict = "right" if self.right else "WRONG"
        return f"{verdict}: KL {self.kl:.1e}, top-1 {self.top1:.3f}, replay {self.replay:.1e}"


def check(bundle: Path, quant: str, device: Device | None, prompt: int = PROMPT) -> ModelAgreement:
    """Compare a prompt, a run, steps and a rewind with the reference graph on the CPU."""
    with open_bundle(bundle) as opened:
        engine = from_bundle(opened, device)
        config = opened.manifest.model
        rng = np.random.default_rng(SEED)
        tokens = rng.integers(0, config.vocab_size, (1, prompt + RUN + STEPS))
        runner = GraphRunner(open_reference(bundle), config)
        expected = runner.run(tokens, runner.initial(capacity=tokens.shape[1]))[0][0]
    logits = run_through(engine, tokens, prompt, RUN)
    replay = _replay_error(engine, tokens, logits, prompt)
    result = agreement(expected, logits)
    top1 = share_of_best(expected, logits)
    kl_limit, top1_limit = LIMITS[quant]
    right = result.kl_nats <= kl_limit and top1 >= top1_limit
    return ModelAgreement(result.kl_nats, top1, replay, right)


def share_of_best(expected: Logits, logits: Logits) -> float:
    """Return the share of rows whose largest logit stands for one of the expected largest."""
    chosen = np.take_along_axis(expected, logits.argmax(-1)[:, None], -1)[:, 0]
    return float(np.mean(expected.max(-1) - chosen <= NEAR_TIE * expected.std()))


def _replay_error(
    engine: CudaEngine, tokens: NDArray[np.int64], logits: Logits, prompt: int
) -> float:
    """Replay the tokens after the prompt as steps, and return the relative difference of logits."""
    state = engine.new_state(window=8)
    engine.run(tokens[:, :prompt], state, commit=True)
    steps = [
        engine.run(tokens[:, i : i + 1], state)[0, 0].copy() for i in range(prompt, tokens.shape[1])
    ]
    spread = float(logits.std()) or 1.0
    return float(np.abs(np.stack(steps) - logits[prompt:]).max()) / spread


# -- times ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuTimes:
    """Median milliseconds, launches and memory.

    Attributes:
        tpot: a step as sessions take it. It can be rewound, so a window of tokens is replayed.
        committed: a step that cannot be rewound.
        verify: a run of K + 1 tokens with all logits, by K.
        ttft: prefill and the logits after it, by prompt length.
        launches: number of launches of a step.
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
    """Time of one kernel over all its launches in a run.

    Attributes:
        launches: number of launches.
        ms: total time of all launches, issued as one graph.
        weight_bytes: weights that all launches read. A cache smaller than that holds none of them
            between replays, because the layers follow one another.
    """

    kernel: str
    launches: int
    ms: float
    weight_bytes: int

    @property
    def bytes_per_s(self) -> float:
        return self.weight_bytes / (self.ms / 1000)


def times(
    engine: CudaEngine,
    prompts: tuple[int, ...],
    drafts: tuple[int, ...],
    repeats: int = REPEATS,
    warm: int = WARM,
) -> GpuTimes:
    """Time one sequence, with a window that can rewind the longest draft."""
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
    prompt_repeats = -(-repeats // 8)
    ttft = {
        n: median_ms(partial(_read, engine, state, tokens[:, :n]), prompt_repeats, warm // 4)
        for n in prompts
    }
    plan = engine.memory_plan(window=max(drafts) + 1, capacity=max(prompts) + 64)
    return GpuTimes(tpot, committed, verify, ttft, len(step_launches(engine.plan)), plan)


def _read(engine: CudaEngine, state: DeviceState, tokens: np.ndarray) -> None:
    state.clear()
    for start in range(0, tokens.shape[1], engine.chunk):
        engine.run(tokens[:, start : start + engine.chunk], state, commit=True)


def step_launches(plan: LaunchPlan) -> tuple[int, ...]:
    """Return the launches of one step of one sequence."""
    chains = [program for program in plan.programs if program.kind == "chain"]
    return chains[0].launches


def kernel_times(
    engine: CudaEngine, repeats: int = REPEATS, warm: int = WARM, tokens: int = 1
) -> list[KernelTime]:
    """Time each kernel of a run alone, with all its layers in one graph; slowest first.

    `tokens`: 1 for a step, else the length of a prompt.
    """
    state = engine.new_state(window=8)
    engine.run(np.zeros((1, tokens), np.int64), state, commit=True)
    key = state.workspace.runs.key("chain", tokens, 1)
    calls, plan = state.workspace.calls(key), engine.plan
    order = plan.programs[key.program].launches
    groups: dict[int, list[int]] = {}
    for position, index in enumerate(order):
        groups.setdefault(plan.launches[index].variant, []).append(position)
    timings = []
    with engine.exclusive as device:
        for variant, positions in groups.items():
            with device.record() as graphs:
                for position in positions:
                    calls[position].issue(device)
            graph = graphs[0]

            def work(graph=graph) -> None:  # type: ignore[no-untyped-def]
                graph.replay()
                device.wait()

            size = sum(_weight_bytes(plan, order[position]) for position in positions)
            name = plan.variants[variant].kernel
            timings.append(KernelTime(name, len(positions), median_ms(work, repeats, warm), size))
    return sorted(timings, key=lambda timing: -timing.ms)


def _weight_bytes(plan: LaunchPlan, index: int) -> int:
    launch = plan.launches[index]
    if plan.variants[launch.variant].kernel.startswith("embed"):
        return 0  # an embedding reads one row of the table
    names = {a.name for a in launch.arguments if isinstance(a, Pointer) and a.space == "weight"}
    return sum(plan.weights[name].elements * ITEM_SIZE[plan.weights[name].dtype] for name in names)


def part_of_gpu(multiprocessors: int) -> CoreDevice:
    """Open a green context, whose stream runs on at least `multiprocessors` of the GPU.

    The driver rounds up. It acts as a small GPU, except that memory and caches are not divided.
    Raises EngineError without a driver or green contexts, and when the GPU has fewer.
    """
    from cuda.bindings import driver

    def unwrap(result: Any) -> Any:
        error, *values = result
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EngineError(
                f"no green context of {multiprocessors} multiprocessors: {error.name}",
                field="multiprocessors",
            )
        return values[0] if values else None

    unwrap(driver.cuInit(0))
    gpu = unwrap(driver.cuDeviceGet(0))
    # a primary context must exist before parts of the GPU can be taken from it
    primary = unwrap(driver.cuDevicePrimaryCtxRetain(gpu))
    unwrap(driver.cuCtxSetCurrent(primary))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    resource = unwrap(driver.cuDeviceGetDevResource(gpu, kind))
    parts = unwrap(driver.cuDevSmResourceSplitByCount(1, resource, 0, multiprocessors))
    descriptor = unwrap(driver.cuDevResourceGenerateDesc([parts[0]], 1))
    flag = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    green = unwrap(driver.cuGreenCtxCreate(descriptor, gpu, flag))
    unwrap(driver.cuCtxSetCurrent(unwrap(driver.cuCtxFromGreenCtx(green))))
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = unwrap(driver.cuGreenCtxStreamCreate(green, flags, 0))
    device = CoreDevice(stream=int(stream))
    # the driver reports the whole GPU, but kernels must spread over this stream's part
    device.multiprocessors = int(parts[0].sm.smCount)
    return device
