"""Names, types and shapes of the device graph's tensors (`graphs/tensorrt.onnx`).

    tokens i32[T,B]   rows i32[L]   run i32[8]   replay i32[P]   slots i32[T]   ancestors i32[A,A]
    taps{K} i32[T,K]   state_taps{K} i32[K-1]   rope{i}.cos, rope{i}.sin f32[T,dim/2]
    each recurrent tensor [2, …slot], log [S,B,width] and KV cache, and after the run `{name}.out`
    logits f32[L,B,V]   picked i32[L,B]

Symbols are those of `edge.runtime.tensorrt.profiles`; here P is always S.
"""

from __future__ import annotations

from edge.launch import (
    LOGITS,
    PICKED,
    Buffer,
    Dims,
    DType,
    LaunchPlan,
    elements,
    host_inputs,
)
from edge.plugins.tensorrt import OUT
from edge.runtime.cuda.runs import RunKey, StateRuns
from edge.runtime.cuda.sliding import SLOTS
from edge.runtime.layout import NUMPY, Shape, StateLayout

_TYPES = {dtype.name: name for name, dtype in NUMPY.items()}


def symbols(runs: StateRuns, key: RunKey) -> dict[str, int]:
    """Return the sizes of a run by symbol."""
    sizes = dict(runs.sizes(key))
    del sizes[SLOTS]  # the graph's caches do not slide
    tree = runs.plan.programs[key.program].kind == "tree"
    return sizes | {"P": sizes["S"], "A": sizes["T"] if tree else 1}


def lists(plan: LaunchPlan) -> dict[str, tuple[DType, Dims]]:
    """Return types and dimensions of the inputs that the host writes before a run."""
    return host_inputs(plan.taps, plan.rotations)


def buffers(plan: LaunchPlan, *, tree: bool) -> dict[str, Buffer]:
    """Return `lists` as buffers for `edge.runtime.cuda.inputs.InputBlock`."""
    return {
        name: Buffer(dtype=dtype, elements=elements(dims, tree=tree))
        for name, (dtype, dims) in lists(plan).items()
    }


def names(plan: LaunchPlan, layout: StateLayout) -> tuple[set[str], set[str]]:
    """Return the names of the inputs that a graph of the plan may have, and of its outputs."""
    kept = {*layout.recurrent, *plan.logs, *layout.caches}
    return {*lists(plan), *kept}, {*(name + OUT for name in kept), LOGITS, PICKED}


def lasting(runs: StateRuns) -> dict[str, tuple[DType, Shape]]:
    """Return types and shapes of the state's tensors."""
    layout, slots = runs.layout, runs.sizes(RunKey(0, 0, 0))["S"]
    tensors = {name: (_type(layout, name), (2, *shape)) for name, shape in layout.recurrent.items()}
    for name, log in runs.plan.logs.items():
        tensors[name] = (log.dtype, (slots, layout.batch, log.width))
    return tensors | {name: (_type(layout, name), shape) for name, shape in layout.caches.items()}


def _type(layout: StateLayout, name: str) -> DType:
    return _TYPES[layout.dtype(name).name]


def shapes(runs: StateRuns, key: RunKey) -> dict[str, Shape]:
    """Return the shape of every input for a run."""
    values = symbols(runs, key)
    inputs: dict[str, Shape] = {
        name: tuple(values[dim] if isinstance(dim, str) else dim for dim in dims)
        for name, (_, dims) in lists(runs.plan).items()
    }
    return inputs | {name: shape for name, (_, shape) in lasting(runs).items()}
