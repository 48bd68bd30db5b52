"""Every value of an interpreted run beside the reference's, kept in step.

Quantized models diverge after a while even when everything is right: a value between two steps
rounds the other way, and all later values differ. So each reference op starts from the kernels'
values, and a comparison covers one launch on the same inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from edge.export.graph.run import GraphRunner, GraphState
from edge.launch import LaunchPlan, Pointer
from edge.plugins.reference.graph import ReferenceGraph
from edge.runtime.cuda.device import Device
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.inputs import DeviceRun
from edge.runtime.cuda.runs import RunKey
from edge.runtime.cuda.state import DeviceState

Values = dict[str, np.ndarray]
_NUMPY = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "u8": np.uint8, "i32": np.int32}


def kernels_values(
    engine: CudaEngine, state: DeviceState, tokens: np.ndarray, commit: bool
) -> Values:
    """Return what each launch of a chain leaves in the arena: value → rows of channels, flat.

    The state is left unchanged.
    """
    workspace, count = state.workspace, tokens.shape[1]
    step = state.ledger.commit(count) if commit else state.ledger.run(count)
    key: RunKey = workspace.runs.key("chain", count, count)
    prepared = workspace.prepared_run(key)
    engine.sources.fill(prepared.inputs, DeviceRun(tokens.T, step, range(count)))
    device = engine.exclusive.device
    device.write(workspace.memory, 0, workspace.host)
    found: Values = {}
    plan = engine.plan
    launches = [plan.launches[i] for i in plan.programs[key.program].launches]
    places, sizes = workspace.runs.arena(workspace.runs.spacious(key)), workspace.runs.sizes(key)
    for call, launch in zip(prepared.work.calls, launches, strict=True):
        call.issue(device)
        for argument in launch.arguments:
            if isinstance(argument, Pointer) and argument.space == "value":
                name = argument.name
                found[name] = _read(
                    device, workspace.arena, places.offsets[name], plan, name, sizes
                )
    device.wait()
    return found


def _read(
    device: Device, arena: Any, at: int, plan: LaunchPlan, name: str, sizes: Any
) -> np.ndarray:
    buffer = plan.values[name]
    dtype = np.dtype(_NUMPY[buffer.dtype])
    stage = device.host(buffer.elements.value(sizes) * dtype.itemsize)
    device.read(stage, arena, at)
    device.wait()
    return stage.view(dtype)


def apart(found: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """Return the largest difference of two arrays, and at how many places they differ.

    For int8: difference in steps, and places that differ. Otherwise: relative to the largest value,
    and places beyond 1e-5 of it.
    """
    distance = np.abs(found.astype(np.float64) - expected)
    if found.dtype == np.int8:
        return float(distance.max(initial=0)), int((distance > 0).sum())
    distance = distance / max(1e-30, float(np.abs(expected).max(initial=0)))
    return float(distance.max(initial=0)), int((distance > 1e-5).sum())


def beside_references(
    engine: CudaEngine, state: DeviceState, graph: GraphRunner, tokens: np.ndarray, *, commit: bool
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], Values]:
    """Return, by value, the kernel's result and the reference's on the same inputs, and the
    reference's state after the run. The engine's state is left unchanged.
    """
    reference = graph.session
    assert isinstance(reference, ReferenceGraph)
    snapshot = state.snapshot(applied=True)
    found = kernels_values(engine, state, tokens, commit)
    out: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def hook(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name not in found or found[name].size != tensor.numel():
            return None
        ours = found[name].reshape(tensor.shape)
        out[name] = (ours, tensor.numpy())
        return torch.from_numpy(ours.astype(tensor.numpy().dtype))

    arrays = {name: value.copy() for name, value in snapshot.recurrent.items()}
    for name, rows in snapshot.caches.items():
        whole = np.zeros(state.layout.caches[name], rows.dtype)
        whole[:, :, : state.position] = rows
        arrays[name] = whole
    reference.hook = hook
    try:
        _, (after,) = graph.run(tokens, GraphState(arrays, state.position))
    finally:
        reference.hook = None
    return out, after.arrays
