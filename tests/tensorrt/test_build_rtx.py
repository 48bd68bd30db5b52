"""TensorRT for RTX builds device graphs ahead of time, on a CPU: engines for GPUs elsewhere.

It has TensorRT's parser, so this runs all that `edge build` does except plugins and what needs a
GPU. Engines cannot be opened without one: their inputs and outputs are compared in the network they
were built from, and by name in the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from onnx import ModelProto

from edge.bundle import open_bundle
from edge.bundle.kernels import open_plan
from edge.config import ModelConfig
from edge.errors import EdgeError, EngineError, InputError
from edge.launch import LaunchPlan
from edge.runtime.layout import StateLayout
from edge.runtime.model import EMBEDDED, resolve
from edge.runtime.tensorrt import bindings, graphfile, machine
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import (
    CompiledEngine,
    EnginePort,
    GraphSource,
    Order,
    ParsedNetwork,
    compile_graph,
    weights_beside,
)
from edge.runtime.tensorrt.graphfile import form_for, of_plugins
from edge.runtime.tensorrt.messages import logger
from edge.runtime.tensorrt.profiles import profiles, sizes
from tests.tensorrt.graphs import Made, made

GPUS = (86, 89)
_STATES = {"float32": "f32", "float16": "f16", "int8": "i8"}
Ports = Mapping[str, EnginePort]


@pytest.fixture(scope="module")
def rtx() -> TensorRT:
    try:
        return bindings.load("rtx")
    except EngineError as absent:
        pytest.skip(f"{absent.message}; `make test` tries to: {absent.remedy}")


def expected(
    plan: LaunchPlan, config: ModelConfig, dtypes: Mapping[str, str]
) -> dict[str, EnginePort]:
    """Return the inputs that a graph of this plan may have, from what the runtime passes."""
    layout = StateLayout.of(config, dtypes=dtypes)
    ports = {}
    for name, shape in layout.recurrent.items():
        axis = 2 if name.endswith(".conv_state") else 1
        dims = [2, *shape]
        ports[name] = EnginePort(
            _STATES[layout.dtype(name).name], (*dims[:axis], -1, *dims[axis + 1 :])
        )
    for name, shape in layout.caches.items():
        ports[name] = EnginePort(_STATES[layout.dtype(name).name], (-1, shape[1], -1, shape[3]))
    for name, log in plan.logs.items():
        # heads and their width, or channels
        ports[name] = EnginePort(log.dtype, (-1, -1, log.width))
    return ports


def check(
    inputs: Ports, outputs: Ports, plan: LaunchPlan, config: ModelConfig, dtypes: Mapping[str, str]
) -> None:
    """Compare TensorRT's inputs and outputs with those of the plan and the model."""
    symbols = {dim for port in inputs.values() for dim in port.dims if isinstance(dim, str)}
    assert symbols <= {"T", "B", "L", "A", "C", "S", "P"}
    inputs = {
        name: EnginePort(
            port.dtype, tuple(-1 if isinstance(dim, str) else dim for dim in port.dims)
        )
        for name, port in inputs.items()
    }
    states = expected(plan, config, dtypes)
    assert {name: inputs[name] for name in states} == states
    assert {name: outputs[f"{name}.out"] for name in states} == states
    assert outputs.keys() == {f"{name}.out" for name in states} | {"logits", "picked"}
    assert outputs["logits"] == EnginePort("f32", (-1, -1, config.vocab_size))
    assert outputs["picked"] == EnginePort("i32", (-1, -1))
    for name in inputs.keys() - states.keys():
        buffer, port = plan.inputs[name], inputs[name]
        fixed = [dim for dim in port.dims if isinstance(dim, int) and dim > 0]
        assert port.dtype == buffer.dtype, name
        # a symbol of the plan is a dimension that varies between runs
        assert len(port.dims) - len(fixed) <= 2 and fixed in ([], [buffer.elements.times]), name


def built(rtx: TensorRT, model: Made, architectures: Sequence[int]) -> CompiledEngine:
    """Build a random model's engine, for the one kind of run that takes any chain."""
    asked = sizes(model.config, 16, window=2)
    (only,) = profiles(asked, trees=False)[-1:]
    order = Order(asked, architectures=tuple(architectures))
    graph = form_for(rtx, model.device.SerializeToString(deterministic=True), "graph")
    weights = os.open(model.folder / "weights.bin", os.O_RDONLY)
    try:
        return compile_graph(rtx, GraphSource(graph, weights, "graph"), order, (only,))
    finally:
        os.close(weights)


@pytest.mark.parametrize(("name", "quant"), [("all", "w8a8"), ("parallel", "fp16")])
def test_a_random_model_of_every_layer_is_built(rtx: TensorRT, name: str, quant: str) -> None:
    """For one GPU; `test_build.py` builds for two at once."""
    model = made(name, quant)
    engine = built(rtx, model, GPUS[:1])
    check(engine.inputs, engine.outputs, model.plan, model.config, model.state_dtypes)
    data = bytes(engine.engine)
    assert len(data) > 100_000 and engine.timings == b""
    for port in (*engine.inputs, *engine.outputs):
        assert port.encode() in data, f"{port} is not in the engine"


def test_weights_may_be_inputs(rtx: TensorRT) -> None:
    """In int8, as for plugins: the network, and an engine without them."""
    model = made("mamba2", "w8a8")
    data, weights = model.device.SerializeToString(deterministic=True), model.plan.weights
    moved = graphfile.with_inputs(data, weights, least=4096)
    names = graphfile.bound(data, weights, least=4096)
    engine = built(rtx, model._replace(device=ModelProto.FromString(moved)), GPUS[:1])
    assert names <= engine.inputs.keys()
    assert "i8" in {engine.inputs[name].dtype for name in names}


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_demonstrations_are_parsed(rtx: TensorRT, name: str) -> None:
    """From the bundle's file, with the bundle's weights."""
    with open_bundle(resolve(name)) as bundle:
        file = machine.graph_file(bundle)
        model = form_for(rtx, bundle.read(file), file)
        log = logger(rtx.module)
        network = ParsedNetwork(rtx, log)
        with weights_beside(bundle.fd("weights.bin")) as folder:
            network.parse(model, folder, file)
            inputs, outputs = network.ports()
        manifest = bundle.manifest
        check(inputs, outputs, open_plan(bundle), manifest.model, manifest.state_dtypes)
        asked = sizes(manifest.model, manifest.limits.chunk)
        config = network.config(inputs, profiles(asked, trees=False))
        assert config.num_optimization_profiles == 3


@pytest.mark.parametrize(("name", "gpu"), [("demo", GPUS[0]), ("demo-fp16", GPUS[1])])
def test_the_demonstrations_are_built(rtx: TensorRT, name: str, gpu: int) -> None:
    with open_bundle(resolve(name)) as bundle:
        manifest, file = bundle.manifest, machine.graph_file(bundle)
        source = GraphSource(form_for(rtx, bundle.read(file), file), bundle.fd("weights.bin"), file)
        asked = sizes(manifest.model, manifest.limits.chunk)
        only = profiles(asked, trees=False)[-1:]
        found = compile_graph(rtx, source, Order(asked, architectures=(gpu,)), only)
        check(found.inputs, found.outputs, open_plan(bundle), manifest.model, manifest.state_dtypes)
    assert b"logits" in bytes(found.engine)


def test_weights_are_those_behind_the_descriptor(rtx: TensorRT, tmp_path: Path) -> None:
    """Whatever is at the path by now: the file was checked when it was opened."""
    model = made("mamba2", "w8a8")
    graph = form_for(rtx, model.device.SerializeToString(deterministic=True), "graph")
    copy = tmp_path / "weights.bin"
    copy.write_bytes((model.folder / "weights.bin").read_bytes())
    fd = os.open(copy, os.O_RDONLY)
    try:
        copy.unlink()
        copy.write_bytes(b"other")
        with weights_beside(fd) as folder:
            assert (folder / "weights.bin").read_bytes() == os.pread(fd, 1 << 30, 0)
            ParsedNetwork(rtx, logger(rtx.module)).parse(graph, folder, "graph")
        assert not folder.exists()
    finally:
        os.close(fd)


def test_a_gpu_that_rtx_does_not_know_is_refused(rtx: TensorRT) -> None:
    with pytest.raises(InputError, match="does not build for sm_87") as caught:
        built(rtx, made("attention", "fp16"), [87])
    assert caught.value.remedy is not None and "86, 89" in caught.value.remedy


def test_a_graph_of_plugins_is_refused_by_node_and_op(rtx: TensorRT) -> None:
    """TensorRT for RTX has no plugins, so the bare graph is one whose library is missing."""
    model = made("mamba1", "fp16")
    without = of_plugins(model.device.SerializeToString(deterministic=True), {})
    first = model.nodes[0]
    weights = os.open(model.folder / "weights.bin", os.O_RDONLY)
    try:
        order = Order(sizes(model.config, 16), architectures=GPUS)
        with pytest.raises(EngineError) as caught:
            compile_graph(
                rtx, GraphSource(without, weights, "bare.onnx"), order, profiles(order.sizes)
            )
    finally:
        os.close(weights)
    problem = caught.value
    assert (problem.file, problem.field) == ("bare.onnx", first.name)
    assert f"node {first.name} of op Edge{first.op_type}: " in problem.message
    assert "edge.device" in problem.message
    assert problem.remedy is not None and "make plugins" in problem.remedy


@pytest.mark.parametrize("data", [b"", b"\x08\x0a", b"no graph at all", bytes(100)])
def test_what_is_no_graph_is_refused(rtx: TensorRT, data: bytes) -> None:
    model = made("attention", "fp16")
    order = Order(sizes(model.config, 16), architectures=GPUS)
    with pytest.raises(EdgeError, match="graph: "):
        compile_graph(rtx, GraphSource(data, None, "graph"), order, profiles(order.sizes))
