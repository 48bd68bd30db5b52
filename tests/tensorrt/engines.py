"""Engines of one model: `ort`, `cuda` interpreted, and `tensorrt` with ONNX Runtime in TensorRT's
place (`ort_tensorrt`).
"""

from __future__ import annotations

import functools
from pathlib import Path

from edge.config import ModelConfig
from edge.plugins.lowering.plan import lower, walked
from edge.plugins.tensorrt.graph import device_graph
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.sliding import RUN
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.ort import OrtEngine
from edge.runtime.tensorrt import cache
from edge.runtime.tensorrt.bindings import Kind, TensorRT
from edge.runtime.tensorrt.contexts import EngineContexts
from edge.runtime.tensorrt.executor import GraphExecutor
from edge.runtime.tensorrt.opening import TensorRTEngine, applying
from edge.runtime.tensorrt.profiles import EngineSizes, profiles, sizes
from tests.cuda.models import CHUNK
from tests.cuda.models import engines as engines_of
from tests.tensorrt import ort_tensorrt

WINDOW, BATCH, CAPACITY = 4, 3, 64


class Trio:
    """Three engines of one model, whose states are interchangeable.

    Attributes:
        tensorrt: out of place, as TensorRT for RTX runs it.
        plugins: in place, as TensorRT does.
        graph: file of the device graph.
        rounded: whether values are rounded to 8 or 16 bits on the way.
    """

    def __init__(self, name: str, quant: str, state: str | None) -> None:
        made = engines_of(name, quant, state)
        self.ort: OrtEngine = made.ort
        self.cuda: CudaEngine = made.cuda
        self.graph = graph = made.folder / "graphs" / "tensorrt.onnx"
        source = (made.folder / "graphs" / "ort.onnx").read_bytes()
        graph.write_bytes(device_graph(source, walked(source, made.folder)).SerializeToString())
        self.tensorrt = tensorrt_engine(made.cuda, graph, "rtx")
        self.plugins = tensorrt_engine(made.cuda, graph, "tensorrt")
        self.rounded = any(w.dtype in ("i8", "f16") for w in made.cuda.plan.weights.values())


@functools.cache
def trio(name: str, quant: str, state: str | None = None) -> Trio:
    """Open the model `name` of tests/test_graph_models.py, with scan states of type `state`."""
    return Trio(name, quant, state)


def built_for(config: ModelConfig, chunk: int = CHUNK) -> EngineSizes:
    return sizes(config, chunk, window=WINDOW, batch=BATCH, capacity=CAPACITY)


def tensorrt_engine(cuda: CudaEngine, graph: Path, kind: Kind) -> TensorRTEngine:
    """Return an engine for the model of `cuda` and the device graph in file `graph`; on its own
    device.

    Its `loaded.module` stands in for TensorRT.
    """
    plan, built, trees = cuda.plan, built_for(cuda.config), kind == "tensorrt"
    if RUN in plan.inputs:  # sliding caches, which TensorRT does not have
        plan = lower(graph.with_name("ort.onnx").read_bytes(), graph.parent.parent)
    device = ort_tensorrt.Stream()
    trt = TensorRT(kind, ort_tensorrt.module(device), (10, 3, 0))
    contexts = EngineContexts(
        trt,
        ort_tensorrt.serialized(graph, built, plan.weights if trees else None),
        device,
        profiles(built, trees=trees),
    )
    exclusive = Exclusive(device)
    rest, variants = applying(plan, contexts.inputs)
    weights = DeviceWeights(rest, exclusive)
    if rest.weights:
        weights.read([(graph.parent.parent / "weights.bin").read_bytes()])
    kernels = {i: device.load(plan.variants[i], None, b"") for i in variants}
    return TensorRTEngine(
        cuda.config, exclusive,
        GraphExecutor(
            PlanExecutor(plan, kernels, weights, device), contexts, built,
            rebuild=lambda larger: cache.command("BUNDLE", larger),
        ),
        chunk=min(cuda.chunk, built.chunk), identity=cuda.identity, state_dtypes=cuda.state_dtypes,
    )  # fmt: skip


def native(engine: TensorRTEngine) -> ort_tensorrt.Engine:
    """Return what runs in TensorRT's place."""
    executor = engine.executor
    assert isinstance(executor, GraphExecutor)
    found: ort_tensorrt.Engine = executor.contexts.native  # type: ignore[attr-defined]
    return found
