"""In-place repacking of loaded weights: see edge_cpu_interleave in calls.h."""

from __future__ import annotations

from edge.errors import EngineError
from edge.launch import ITEM_SIZE, Pointer
from edge.launch_checks import REMEDY
from edge.plugins.cpu.library import CpuReader, library
from edge.runtime.cuda.launching import PlanExecutor

IMPOSSIBLE = 2  # return value of edge_cpu_interleave


def interleave(executor: PlanExecutor) -> None:
    """Repack the rows of weights into the order that the kernels read fastest.

    Done once per set of weights: executors that share weights also share kernels. Raises
    EngineError if there is no memory for a few rows, or if the plan reads a weight beyond the
    largest possible size.
    """
    weights, kernels = executor.weights, executor.kernels
    if weights.read_by is not None:
        assert weights.read_by is kernels
        return
    weights.read_by = kernels
    readers = []
    for launch in executor.plan.launches:
        for position, argument in enumerate(launch.arguments):
            if not isinstance(argument, Pointer) or argument.space != "weight":
                continue
            weight = executor.plan.weights[argument.name]
            readers.append(
                CpuReader(
                    kernels[launch.variant][0].handle,
                    -1 if argument.at else position,
                    weights.address(argument.name),
                    weight.elements * ITEM_SIZE[weight.dtype],
                )
            )
    status = library().edge_cpu_interleave((CpuReader * len(readers))(*readers), len(readers))
    if status == IMPOSSIBLE:
        raise EngineError("the plan reads a weight beyond the largest possible size", remedy=REMEDY)
    if status:
        raise EngineError("no memory to repack weights")
