"""The device graph run by its plugins in place of TensorRT, with the interface of `EngineContexts`.

It runs in place and with trees, as plugins do, and shows all of the tensorrt engine except
TensorRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edge.runtime.layout import Shape
from edge.runtime.tensorrt.contexts import GraphRun
from edge.runtime.tensorrt.executor import GraphExecutor
from edge.runtime.tensorrt.opening import TensorRTEngine
from edge.runtime.tensorrt.profiles import EngineSizes
from tests.tensorrt.device_graph import OUT, DeviceGraph
from tests.tensorrt.machine import machine
from tests.tensorrt.plugin_host import Tensor
from tests.tensorrt.plugin_models import BATCH, CAPACITY, CHUNK, WINDOW, Model
from tests.tensorrt.running import Placed


class _Elsewhere(NamedTuple):
    """Memory owned by someone else."""

    address: int
    nbytes: int = 0


class PluginContexts:
    """Contexts that run the device graph by its plugins.

    Attributes:
        enqueued: sizes of the runs so far.
    """

    in_place = trees = True
    scratch_bytes = weights_bytes = 0

    def __init__(self, graph: DeviceGraph) -> None:
        self.graph = graph
        self.enqueued: list[Mapping[str, int]] = []

    def bound(self, run: GraphRun, *, own: bool) -> _Bound:
        return _Bound(self, run.symbols, run.shapes, dict(run.addresses))


class _Bound:
    # ONNX's reference ops do not run on the stream
    recordable = False

    def __init__(
        self,
        contexts: PluginContexts,
        symbols: Mapping[str, int],
        shapes: Mapping[str, Shape],
        addresses: dict[str, int],
    ) -> None:
        self._contexts, self._symbols, self._shapes = contexts, symbols, shapes
        self._addresses = addresses

    def bind(self, addresses: Mapping[str, int]) -> None:
        self._addresses = dict(addresses)

    def enqueue(self) -> None:
        graph = self._contexts.graph
        inputs = {
            name: self._placed(name, Tensor(each.dtype, tuple(self._shapes[name])))
            for name, each in graph.inputs.items()
        }
        for name, each in inputs.items():
            assert each.tensor.shape == graph.inputs[name].of(self._symbols).shape, name
        outputs = {
            name: self._placed(name, each.of(self._symbols))
            for name, each in graph.outputs.items()
            if not name.endswith(OUT)
        }
        for name in graph.outputs.keys() - outputs.keys():
            assert self._addresses[name] == self._addresses[name.removesuffix(OUT)]
        graph.run(inputs, outputs)
        machine().wait()
        self._contexts.enqueued.append(self._symbols)

    def _placed(self, name: str, tensor: Tensor) -> Placed:
        return Placed(tensor, _Elsewhere(self._addresses[name]))


def tensorrt_engine(made: Model) -> TensorRTEngine:
    """Return an engine for states of the size that the model's plugins were built for."""
    engine = made.engine
    return TensorRTEngine(
        engine.config, engine.exclusive,
        GraphExecutor(
            engine.executor, PluginContexts(made.graph),
            EngineSizes(window=WINDOW, batch=BATCH, capacity=CAPACITY, chunk=CHUNK),
            rebuild=lambda larger: "build it again",
        ),
        chunk=CHUNK, identity=engine.identity, state_dtypes=made.state_dtypes,
    )  # fmt: skip
