"""Small models for the plugins: the launch plan on the machine, and the device graph beside it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from edge.config import Mamba2Config
from edge.export.graph import BuiltGraph
from edge.launch import LaunchPlan
from edge.plugins.lowering.plan import lower
from edge.plugins.tensorrt.graph import device_graph
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.inputs import DeviceRun
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import Identity
from edge.runtime.ledger import log_slots
from tests import quantized_models
from tests.tensorrt.device_graph import DeviceGraph
from tests.tensorrt.machine import machine
from tests.tensorrt.running import NUMPY, Array, Placed, put, with_kernels
from tests.test_graph_models import MODELS

CHUNK, BATCH, WINDOW, CAPACITY = 24, 2, 4, 64
LARGEST = {
    "T": CHUNK, "B": BATCH, "L": CHUNK, "C": CAPACITY, "S": log_slots(WINDOW),
    "P": log_slots(WINDOW), "A": 16,
}  # fmt: skip
# besides those of tests/test_graph_models.py: a gate of int8 values without a norm
OWN = {
    "plain gate": (Mamba2Config(d_inner=64, d_ssm=64, d_state=8, head_dim=16, gated_norm=False),),
}
_ROOT = tempfile.TemporaryDirectory(prefix="edge-plugin-models-")


@dataclass(frozen=True)
class Model:
    """The same model twice, on one machine: `engine` launches its plan, `graph` its plugins.

    Attributes:
        path: of the graph for ONNX Runtime.
        state_dtypes: of its states.
    """

    engine: CudaEngine
    graph: DeviceGraph
    path: Path
    state_dtypes: Mapping[str, str]

    @property
    def plan(self) -> LaunchPlan:
        return self.engine.plan


@dataclass(frozen=True)
class Source:
    """A graph for ONNX Runtime, in a folder with its weights, and what is made of it."""

    built: BuiltGraph
    folder: Path
    plan: LaunchPlan
    graph: DeviceGraph


@functools.cache
def source(name: str, quant: str, state: str | None) -> Source:
    """The model `name` of OWN or tests/test_graph_models.py, its scans' states of type `state`."""
    folder = Path(_ROOT.name) / f"{name}-{quant}-{state}"
    folder.mkdir(exist_ok=True)
    choices = {} if state is None else {"ssm_state": state}
    with patch.dict(MODELS, OWN):
        _, mixed = quantized_models.plan_of(name, quant, **choices)
        built = quantized_models.built(name, mixed, folder)
    data = built.graph.read_bytes()
    plan = lower(data, folder)
    library = with_kernels(plan.variants)
    return Source(
        built, folder, plan, DeviceGraph(device_graph(data, folder), folder, library, LARGEST)
    )


class GraphSlots(PlanExecutor):
    """States of as many slots as the graph's inputs have."""

    def state_slots(self, window: int) -> int:
        return 2


@functools.cache
def model(name: str, quant: str, state: str | None = None) -> Model:
    """Both engines of it."""
    made = source(name, quant, state)
    built, plan = made.built, made.plan
    exclusive = Exclusive(machine().device)
    weights = DeviceWeights(plan, exclusive)
    weights.read([(made.folder / "weights.bin").read_bytes()])
    kernels = {index: machine().load(each) for index, each in enumerate(plan.variants)}
    engine = CudaEngine(
        quantized_models.network(name).config, exclusive,
        GraphSlots(plan, kernels, weights, exclusive.device),
        chunk=CHUNK, identity=Identity("test"), state_dtypes=built.state_dtypes,
    )  # fmt: skip
    return Model(engine, made.graph, built.graph, built.state_dtypes)


def run(
    made: Model,
    state: DeviceState,
    tokens: Array,
    *,
    parents: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    commit: bool = False,
) -> dict[str, Placed]:
    """The plugins' run of tokens [B, T]: every value of the graph, and the state moved on."""
    count = tokens.shape[1]
    tree = None if parents is None else tuple(parents)
    step = state.ledger.commit(count) if commit else state.ledger.run(count, parents=tree)
    wanted = range(count) if rows is None else rows
    sizes = {
        "T": count, "B": state.layout.batch, "L": len(wanted), "C": state.layout.capacity,
        "S": log_slots(state.window), "P": max(1, len(step.pending)),
        "A": 1 if tree is None else count,
    }  # fmt: skip
    tensors = {name: each.of(sizes) for name, each in made.graph.inputs.items()}
    host = {
        name: np.full(tensor.shape, -1, NUMPY[tensor.dtype]).reshape(-1)
        for name, tensor in tensors.items()
        if f"{name}.out" not in made.graph.outputs
    }
    chain = tree is None and host.pop("ancestors", None) is not None
    made.engine.sources.fill(host, DeviceRun(tokens.T, step, wanted))
    if chain:
        host["ancestors"] = np.ones(1, np.int32)
    inputs = {name: put(array.reshape(tensors[name].shape)) for name, array in host.items()}
    for name in tensors.keys() - host.keys():
        inputs[name] = _of_state(state, name, tensors[name])
    values = made.graph.run(inputs)
    machine().wait()
    state.ledger = step.after
    return values


def _of_state(state: DeviceState, name: str, tensor: Any) -> Placed:
    cached = name in state.cache_where
    memory = state.caches if cached else state.recurrent
    place = (state.cache_where if cached else state.where)[name]
    assert memory is not None
    assert place.nbytes == int(np.prod(tensor.shape)) * np.dtype(NUMPY[tensor.dtype]).itemsize
    return Placed(tensor, memory, place.offset)


def memory_of(state: DeviceState) -> dict[str, bytes]:
    """Every byte of a state's memory, used or not: recurrent with logs, and caches."""
    device = machine().device
    found = {}
    for name, memory in (("recurrent", state.recurrent), ("caches", state.caches)):
        if memory is not None:
            stage = device.host(memory.nbytes)
            device.read(stage, memory, 0)
            machine().wait()
            found[name] = stage.tobytes()
    return found
