"""Weights repacked where they lie, once they are loaded: see edge_cpu_interleave of calls.h."""

from __future__ import annotations

from edge.errors import EngineError
from edge.launch import ITEM_SIZE, Pointer
from edge.launch_checks import REMEDY
from edge.plugins.cpu.library import CpuReader, library
from edge.runtime.cuda.launching import PlanExecutor

IMPOSSIBLE = 2  # of edge_cpu_interleave


def interleave(executor: PlanExecutor) -> None:
    """Have the rows of weights lie as its kernels read them fastest. Done once for the weights:
    executors that share them share their kernels.

    Raises EngineError: no memory for a few rows; a plan that reads a weight as of more bytes than
    there can be.
    """
    weights, kernels = executor.weights, executor.kernels
    if weights.read_by is not None:
        assert weights.read_by is kernels
        return
    weights.read_by = kernels
    readers = []
    for launch in executor.plan.launches:
        for place, argument in enumerate(launch.arguments):
            if not isinstance(argument, Pointer) or argument.space != "weight":
                continue
            weight = executor.plan.weights[argument.name]
            readers.append(
                CpuReader(
                    kernels[launch.variant][0].handle,
                    -1 if argument.at else place,
                    weights.address(argument.name),
                    weight.elements * ITEM_SIZE[weight.dtype],
                )
            )
    refused = library().edge_cpu_interleave((CpuReader * len(readers))(*readers), len(readers))
    if refused == IMPOSSIBLE:
        raise EngineError("a weight is read as of more bytes than there can be", remedy=REMEDY)
    if refused:
        raise EngineError("no memory to repack weights")
