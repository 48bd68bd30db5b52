"""The `tensorrt` engine: the CUDA engine, with an execution context in place of a program."""

from __future__ import annotations

from collections.abc import Collection

from edge.launch import LaunchPlan, Pointer
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.layout import StateLayout
from edge.runtime.tensorrt.executor import GraphExecutor


class TensorRTEngine(CudaEngine):
    """The device graph of a bundle on one device. States, inputs and recorded graphs are the
    CUDA engine's; so are state files.
    """

    name = "tensorrt"
    executor: GraphExecutor

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """A capacity that is not asked for is at most what the engine was built for."""
        layout = super()._layout(batch, window, capacity)
        if capacity is None and layout.capacity > self.executor.sizes.capacity:
            return super()._layout(batch, window, self.executor.sizes.capacity)
        return layout

    @property
    def longest_window(self) -> int:
        """What the graph was built for."""
        return self.executor.sizes.window

    @property
    def finds_argmax(self) -> bool:
        """The graph always ends in them."""
        return True


def applying(plan: LaunchPlan, inputs: Collection[str]) -> tuple[LaunchPlan, tuple[int, ...]]:
    """The plan with those constants alone that its settle program reads or that are `inputs` of the
    engine, and which variants that program launches: all that has to be on the device besides.
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
    weights = {name: w for name, w in plan.weights.items()
               if ("weight", name) in read or name in inputs}  # fmt: skip
    inline = {name: c for name, c in plan.inline.items() if ("inline", name) in read}
    reduced = plan.model_copy(update={"weights": weights, "inline": inline})
    return reduced, tuple(sorted({launch.variant for launch in launches}))
