"""The `cpu` engine: a bundle's launch plan over compiled kernels, without ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edge import cpu
from edge.bundle.kernels import open_plan
from edge.config import ModelConfig
from edge.errors import InputError
from edge.runtime import memory
from edge.runtime.cpu.device import CpuDevice, HostMemory
from edge.runtime.cpu.interleave import interleave
from edge.runtime.cpu.joint import JointRuns, SplitPlan, split, step_jointly
from edge.runtime.cpu.planning import any_tree, plan_bundle
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.executor import Executor
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.opening import from_bundle
from edge.runtime.cuda.state import DeviceState
from edge.runtime.engine import DEFAULT_WINDOW, JointStep, Stepped, within

if TYPE_CHECKING:
    from edge.bundle import Bundle

# Bytes of weights up to which one thread is faster: waking a second one costs more than it saves.
_SINGLE_THREAD_BYTES = 8_000_000


class CpuEngine(CudaEngine):
    """Runs a launch plan on the CPU, with the states, state files and ledger of the CUDA engine."""

    name = "cpu"
    _joint: JointRuns | None = None

    def __init__(
        self, config: ModelConfig, exclusive: Exclusive, executor: Executor, **told: Any
    ) -> None:
        """See `CudaEngine`. Repacks the weights. Raises EngineError if memory runs out."""
        super().__init__(config, exclusive, executor, **told)
        assert isinstance(executor, PlanExecutor)
        interleave(executor)

    def new_state(
        self, *, batch: int = 1, window: int = DEFAULT_WINDOW, capacity: int | None = None
    ) -> DeviceState:
        memory.check_state(self.memory_plan(batch=batch, window=window, capacity=capacity))
        return super().new_state(batch=batch, window=window, capacity=capacity)

    @property
    def threads(self) -> int:
        """Number of CPU threads of a run."""
        device = self.exclusive.device
        assert isinstance(device, CpuDevice)
        return device.pool.threads

    @cached_property
    def _split_plan(self) -> SplitPlan | None:
        return split(self.plan)

    @property
    def most_joined(self) -> int:
        return 1 if self._split_plan is None else self._split_plan.rows

    def step_jointly(self, steps: Sequence[JointStep]) -> list[Stepped]:
        self.exclusive.check_process()
        within(len(steps), self.most_joined, "steps")
        if self._joint is None:
            assert self._split_plan is not None
            self._joint = JointRuns(self, self._split_plan)
        return step_jointly(self, self._joint, steps)

    def attach(self, state: DeviceState) -> None:
        # a prompt fills only the beginning of each head's cache, but with huge pages it would touch
        # all of it, and zeroing 190 MB takes longer than prefill
        if isinstance(state.caches, HostMemory):
            state.caches.take_small_pages()
        super().attach(state)

    @staticmethod
    def from_bundle(bundle: Bundle, *, threads: int | None = None, pin: bool = False) -> CpuEngine:
        """Return the engine for a bundle.

        `threads` None is one per physical core this process may use, or one for a small model.
        `pin`: keep each thread but the caller on a CPU of its own; see `Pool`.
        Raises BundleError without a launch plan, InputError for fewer than one thread or more
        pinned threads than CPUs, and EngineError if the kernels are not compiled, threads cannot
        be pinned or memory runs out.
        """
        if threads is None:
            weights = sum(e.size for e in bundle.manifest.files if e.path.endswith(".bin"))
            threads = 1 if weights <= _SINGLE_THREAD_BYTES else cpu.usable_cores()
        if threads < 1:
            raise InputError(f"threads must be positive, got {threads}", field="threads")
        device, plan = CpuDevice(threads, pin=pin), any_tree(open_plan(bundle))
        smallest_plan = plan_bundle(bundle.manifest, plan, window=1, capacity=1)
        memory.check_load(smallest_plan, bundle.path)
        engine = from_bundle(bundle, device, CpuEngine, plan)
        assert isinstance(engine, CpuEngine)
        return engine
