"""Models on two engines: the same graph run by ONNX Runtime, and lowered and interpreted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge.config import ModelConfig
from edge.launch import LaunchPlan
from edge.plugins.lowering.plan import lower
from edge.runtime.cpu.engine import CpuEngine
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.sliding import sliding
from edge.runtime.cuda.state import DeviceState
from edge.runtime.cuda.weights import DeviceWeights
from edge.runtime.layout import Identity
from edge.runtime.ort import OrtEngine
from tests import on_device, quantized_models
from tests.on_device import device_with

CHUNK = 48
_ROOT = tempfile.TemporaryDirectory(prefix="edge-cuda-models-")


@dataclass(frozen=True)
class Engines:
    """Two engines of one model, whose states are interchangeable; `folder` holds the model."""

    ort: OrtEngine
    cuda: CudaEngine
    folder: Path


def engines(name: str, quant: str, state: str | None = None) -> Engines:
    """Open the model `name` of tests/test_graph_models.py, with scan states of type `state`."""
    return _engines(name, quant, state, on_device.chosen())


@functools.cache
def _engines(name: str, quant: str, state: str | None, where: str) -> Engines:
    graph, dtypes = _built(name, quant, state)
    ort = _ort(name, quant, state)  # the same, wherever kernels run
    cuda = cuda_engine(graph, ort.config, dtypes, CHUNK, ort.identity, plan=_plan(graph))
    return Engines(ort, cuda, graph.parent.parent)


@functools.cache
def _ort(name: str, quant: str, state: str | None) -> OrtEngine:
    graph, dtypes = _built(name, quant, state)
    config = quantized_models.network(name).config
    return OrtEngine(graph, config, threads=1, chunk=CHUNK, state_dtypes=dtypes)


@functools.cache
def _built(name: str, quant: str, state: str | None) -> tuple[Path, Mapping[str, str]]:
    folder = Path(_ROOT.name) / f"{name}-{quant}-{state}"
    folder.mkdir(exist_ok=True)
    choices = {} if state is None else {"ssm_state": state}
    _, plan = quantized_models.plan_of(name, quant, **choices)
    built = quantized_models.built(name, plan, folder)
    return built.graph, built.state_dtypes


def _lowered(graph: Path) -> LaunchPlan:
    return lower(graph.read_bytes(), graph.parent.parent)


_plan = functools.cache(_lowered)  # of graphs that stay


def both(
    graph: Path, config: ModelConfig, dtypes: Mapping[str, str], chunk: int = CHUNK
) -> Engines:
    """Open both engines for a graph file of a bundle's folder."""
    ort = OrtEngine(graph, config, threads=1, chunk=chunk, state_dtypes=dtypes)
    cuda = cuda_engine(graph, config, dtypes, chunk, ort.identity)
    return Engines(ort, cuda, graph.parent.parent)


def tiny_engine(name: str, quant: str) -> CudaEngine:
    """Open a new `cuda` engine of the model `name`."""
    graph, dtypes = _built(name, quant, None)
    identity = Identity("tiny")
    config = quantized_models.network(name).config
    return cuda_engine(graph, config, dtypes, CHUNK, identity, plan=_plan(graph))


def sliding_and_whole(name: str, quant: str, chunk: int) -> tuple[CudaEngine, CudaEngine]:
    """Open two engines of the model `name`; only in the first do caches with windows slide."""
    graph, dtypes = _built(name, quant, None)
    config, identity = quantized_models.network(name).config, Identity("tiny")
    slid, whole = (
        cuda_engine(graph, config, dtypes, chunk, identity, slides=slides, plan=_plan(graph))
        for slides in (True, False)
    )
    return slid, whole


def cuda_engine(
    graph: Path,
    config: ModelConfig,
    dtypes: Mapping[str, str],
    chunk: int,
    identity: Identity,
    *,
    slides: bool = True,
    plan: LaunchPlan | None = None,
) -> CudaEngine:
    """Open a `cuda` engine; `slides`: whether caches of layers with a window slide; `plan`: the
    graph's, if known.
    """
    folder = graph.parent.parent
    plan = plan or _lowered(graph)
    plan = sliding(plan) if slides else plan
    device, loaded = device_with(plan.variants)
    kernels = dict(enumerate(loaded))
    exclusive = Exclusive(device)
    weights = DeviceWeights(plan, exclusive)
    weights.read([(folder / "weights.bin").read_bytes()])
    kind = CpuEngine if on_device.native() else CudaEngine
    return kind(
        config, exclusive, PlanExecutor(plan, kernels, weights, device),
        chunk=chunk, identity=identity, state_dtypes=dtypes,
    )  # fmt: skip


def poison(engine: CudaEngine, state: DeviceState) -> None:
    """Fill everything that a run must not rely on with NaN, and with bytes of 0x7f for integers."""
    ledger = state.ledger
    with engine.exclusive as device:
        for memory in (state.workspace.arena, state.workspace.memory):
            device.fill(memory, 0, memory.nbytes, 0xFF)
        used = set(ledger.pending) | set(ledger.tree.slots if ledger.tree else ())
        for name, place in state.where.items():
            byte = 0x7F if state.layout.dtypes.get(name) == "int8" else 0xFF
            slots = range(place.nbytes // place.slot)
            kept = {ledger.source} if name in state.layout.recurrent else used
            for slot in set(slots) - kept:
                device.fill(state.recurrent, place.offset + slot * place.slot, place.slot, byte)
        if ledger.tree is None:
            spoil_caches(engine, state)


def spoil_caches(engine: CudaEngine, state: DeviceState) -> None:
    """Write NaN to every KV cache slot after the last token."""
    with engine.exclusive as device:
        for name, at, row in state.cache_starts():
            used = state.position - (state.ledger.first if state.layout.slides(name) else 0)
            free = (state.layout.caches[name][2] - used) * row
            device.fill(state.caches, at + used * row, free, 0xFF)


def tokens(
    count: int, batch: int = 1, seed: int = 0, vocab: int = quantized_models.V
) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (batch, count))
