"""Engines of one model: `ort`, `cuda` interpreted, and `tensorrt` with ONNX Runtime in TensorRT's
place (`ort_contexts`).
"""

from __future__ import annotations

import functools
from pathlib import Path

from edge.config import ModelConfig
from edge.plugins.tensorrt.graph import device_graph
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.exclusive import Exclusive
from edge.runtime.cuda.weights import Weights
from edge.runtime.ort import OrtEngine
from edge.runtime.tensorrt import cache
from edge.runtime.tensorrt.engine import TensorRTEngine, settling
from edge.runtime.tensorrt.profiles import Sizes, sizes
from tests.cuda.models import CHUNK, device_with
from tests.cuda.models import engines as engines_of
from tests.tensorrt.ort_contexts import OrtContexts

WINDOW, BATCH, CAPACITY = 4, 3, 64


class Trio:
    """Three engines of one model, whose states belong to the same identity.

    Attributes:
        contexts: what the tensorrt engine runs; `graph`: its file.
        rounded: values are rounded to 8 or 16 bits on the way.
    """

    def __init__(self, name: str, quant: str, state: str | None) -> None:
        made = engines_of(name, quant, state)
        self.ort: OrtEngine = made.ort
        self.cuda: CudaEngine = made.cuda
        self.graph = graph = made.folder / "graphs" / "tensorrt.onnx"
        source = (made.folder / "graphs" / "ort.onnx").read_bytes()
        graph.write_bytes(device_graph(source, made.folder).SerializeToString())
        self.tensorrt, self.contexts = tensorrt_engine(made.cuda, graph)
        self.rounded = any(w.dtype in ("i8", "f16") for w in made.cuda.plan.weights.values())


@functools.cache
def trio(name: str, quant: str, state: str | None = None) -> Trio:
    """The model `name` of tests/test_graph_models.py, its scans' states of type `state`."""
    return Trio(name, quant, state)


def built_for(config: ModelConfig, chunk: int = CHUNK) -> Sizes:
    return sizes(config, chunk, window=WINDOW, batch=BATCH, capacity=CAPACITY)


def tensorrt_engine(
    cuda: CudaEngine, graph: Path, built: Sizes | None = None
) -> tuple[TensorRTEngine, OrtContexts]:
    """For the model of `cuda`, whose device graph is in the file `graph`; a device of its own."""
    plan, built = cuda.plan, built or built_for(cuda.config)
    device, kernels = device_with(plan)
    contexts = OrtContexts(graph, device, built)
    exclusive = Exclusive(device)
    rest, variants = settling(plan)
    weights = Weights(rest, exclusive)
    if rest.weights:
        weights.read([(graph.parent.parent / "weights.bin").read_bytes()])
    engine = TensorRTEngine(
        plan, cuda.config, exclusive, weights, {i: kernels[i] for i in variants}, contexts,
        sizes=built, rebuild=lambda larger: cache.command("BUNDLE", larger),
        chunk=cuda.chunk, identity=cuda.identity, state_dtypes=cuda._state_dtypes,
    )  # fmt: skip
    return engine, contexts
