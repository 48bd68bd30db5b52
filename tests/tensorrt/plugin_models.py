"""Small models for the plugins: the launch plan on the machine, and the device graph beside it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from edge.config import Mamba2Config, MlpConfig
from edge.export.graph import BuiltGraph
from edge.launch import LaunchPlan
from edge.plugins.lowering import plan as lowering
from edge.plugins.tensorrt.graph import device_graph
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import Identity
from edge.runtime.ledger import log_slots
from tests import quantized_models
from tests.tensorrt.device_graph import DeviceGraph
from tests.tensorrt.machine import machine
from tests.tensorrt.running import with_kernels
from tests.test_graph_models import MODELS

CHUNK, BATCH, WINDOW, CAPACITY = 24, 2, 4, 64
LARGEST = {
    "T": CHUNK, "B": BATCH, "L": CHUNK, "C": CAPACITY, "S": log_slots(WINDOW),
    "P": log_slots(WINDOW), "A": 16,
}  # fmt: skip
# besides those of tests/test_graph_models.py: a gate of int8 values without a norm, capped logits,
# and logits of a third of the ids
OWN = {
    "plain gate": (Mamba2Config(d_inner=64, d_ssm=64, d_state=8, head_dim=16, gated_norm=False),),
    "capped": (MlpConfig(d_intermediate=40),),
    "listed": (MlpConfig(d_intermediate=40),),
}
_ROOT = tempfile.TemporaryDirectory(prefix="edge-plugin-models-")


@dataclass(frozen=True)
class Model:
    """The same model twice, on one machine: `engine` launches its plan, `graph` its plugins.

    Attributes:
        path: file of the graph for ONNX Runtime.
        state_dtypes: types of its states.
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
    """A graph for ONNX Runtime, in a folder with its weights, and what is made from it."""

    built: BuiltGraph
    folder: Path
    plan: LaunchPlan
    graph: DeviceGraph


@functools.cache
def source(name: str, quant: str, state: str | None) -> Source:
    """Return the model `name` of OWN or tests/test_graph_models.py, with scan states of type
    `state`.
    """
    folder = Path(_ROOT.name) / f"{name}-{quant}-{state}"
    folder.mkdir(exist_ok=True)
    choices = {} if state is None else {"ssm_state": state}
    with patch.dict(MODELS, OWN):
        _, mixed = quantized_models.plan_of(name, quant, **choices)
        built = quantized_models.built(name, mixed, folder)
    data = built.graph.read_bytes()
    lowered = lowering.walked(data, folder)
    plan = lowering.plan_of(lowered)
    library = with_kernels(plan.variants)
    return Source(
        built, folder, plan, DeviceGraph(device_graph(data, lowered), folder, library, LARGEST)
    )


class GraphSlots(PlanExecutor):
    """States with as many slots as the graph's inputs."""

    def state_slots(self, window: int) -> int:
        return 2


@functools.cache
def model(name: str, quant: str, state: str | None = None) -> Model:
    """Open both engines of the model."""
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


def memory_of(state: DeviceState) -> dict[str, bytes]:
    """Return every byte of a state's memory, used or not: states with logs, and caches."""
    device = machine().device
    found = {}
    for name, memory in (("recurrent", state.recurrent), ("caches", state.caches)):
        if memory is not None:
            stage = device.host(memory.nbytes)
            device.read(stage, memory, 0)
            machine().wait()
            found[name] = stage.tobytes()
    return found
