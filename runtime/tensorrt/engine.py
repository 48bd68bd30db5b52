"""The `tensorrt` engine: the CUDA engine, with an execution context in place of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edge.config import ModelConfig
from edge.launch import LaunchPlan, Pointer
from edge.runtime.cuda.engine import DEFAULT_CHUNK, CudaEngine
from edge.runtime.cuda.exclusive import Exclusive
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import Identity, StateLayout
from edge.runtime.tensorrt.executor import Contexts, GraphExecutor
from edge.runtime.tensorrt.profiles import EngineSizes


class TensorRTEngine(CudaEngine):
    """The device graph of a bundle on one device. States, inputs and recorded graphs are the
    CUDA engine's; so are state files.

    Attributes:
        sizes: what the graph was built for. `chunk` is at most its.
    """

    name = "tensorrt"

    def __init__(
        self,
        plan: LaunchPlan,
        config: ModelConfig,
        exclusive: Exclusive,
        weights: DeviceWeights,
        kernels: Mapping[int, Any],
        contexts: Contexts,
        *,
        sizes: EngineSizes,
        rebuild: Callable[[EngineSizes], str],
        chunk: int = DEFAULT_CHUNK,
        identity: Identity,
        state_dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """`weights`, `kernels`: of `applying(plan)`, at least; `rebuild`: the command that builds
        for other sizes.

        Raises BundleError: the plan wants an input that this version does not make.
        """
        super().__init__(
            plan,
            config,
            exclusive,
            weights,
            kernels,
            chunk=min(chunk, sizes.chunk),
            identity=identity,
            state_dtypes=state_dtypes,
        )
        self.sizes = sizes
        launches = PlanExecutor(plan, kernels, weights, exclusive.device)
        self.executor = GraphExecutor(launches, contexts, sizes, rebuild)

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """A capacity that is not asked for is at most what the engine was built for."""
        layout = super()._layout(batch, window, capacity)
        if capacity is None and layout.capacity > self.sizes.capacity:
            return super()._layout(batch, window, self.sizes.capacity)
        return layout

    @property
    def longest_window(self) -> int:
        """What the graph was built for."""
        return self.sizes.window

    @property
    def finds_argmax(self) -> bool:
        """The graph always ends in them."""
        return True


def applying(plan: LaunchPlan) -> tuple[LaunchPlan, tuple[int, ...]]:
    """The plan with those constants alone that its settle program reads, and which variants that
    launches: all that has to be on the device besides the graph.
    """
    launches = [
        plan.launches[index]
        for program in plan.programs
        if program.kind == "settle"
        for index in program.launches
    ]
    read = {
        (argument.space, argument.name)
        for launch in launches
        for argument in launch.arguments
        if isinstance(argument, Pointer)
    }
    weights = {name: w for name, w in plan.weights.items() if ("weight", name) in read}
    inline = {name: c for name, c in plan.inline.items() if ("inline", name) in read}
    reduced = plan.model_copy(update={"weights": weights, "inline": inline})
    return reduced, tuple(sorted({launch.variant for launch in launches}))
