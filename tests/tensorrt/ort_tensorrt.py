"""The part of TensorRT's Python interface that the runtime uses, implemented with ONNX Runtime.

An engine is a device graph and the sizes it was built for. A run executes the graph's bodies at the
addresses given to a context, in place where inputs and outputs share one. Like TensorRT it reports
what lies outside a profile through the error recorder. Unlike TensorRT it also refuses what the
Developer Guide calls undefined: unaligned addresses, capturing a run that was not rehearsed,
replaying a graph whose context has changed since. Bodies take every run for a chain.

It does not prove that TensorRT behaves as documented. `test_contexts.py` checks the names and
parameters against the real bindings.
"""

from __future__ import annotations

import abc
import ctypes
import enum
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from edge.launch import Weight
from edge.plugins.compiler.interpreter import InterpretDevice
from edge.runtime import ort_session
from edge.runtime.tensorrt import graphfile, profiles
from edge.runtime.tensorrt.compile import EnginePort

STREAM = 0x57AE
SCRATCH = 4096
_TYPES = {"f32": np.float32, "f16": np.float16, "i8": np.int8, "i32": np.int32}


_NAMES = {
    TensorProto.FLOAT: "f32", TensorProto.FLOAT16: "f16", TensorProto.INT8: "i8",
    TensorProto.INT32: "i32",
}  # fmt: skip


def _port(value: Any) -> EnginePort:
    tensor = value.type.tensor_type
    dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return EnginePort(_NAMES[tensor.elem_type], dims)


class Stream(InterpretDevice):
    """An interpreter with a stream for others to issue to; what they issue can be recorded."""

    def enqueue(self, work: Callable[[int], object]) -> None:
        work(STREAM)

    def keep(self, holder: Any, objects: list[Any]) -> None:
        weakref.finalize(holder, objects.clear)

    @property
    def recording(self) -> bool:
        return self._recording is not None

    def issue(self, action: Callable[[], None]) -> None:
        self._issue(action)


def serialized(
    graph: Path, built: profiles.EngineSizes, weights: Mapping[str, Weight] | None = None
) -> bytes:
    """Serialize an engine; `graph` lies in the folder `graphs` beside weights.bin. `weights`: the
    plan's weights, for an engine of plugins; all that can be inputs are.
    """
    facts = {
        "graph": str(graph),
        "sizes": built.model_dump(),
        "weights": None if weights is None else {n: w.model_dump() for n, w in weights.items()},
    }
    return json.dumps(facts).encode()


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger(abc.ABC):
    Severity = Severity

    @abc.abstractmethod
    def log(self, severity: Severity, msg: str) -> None: ...


class IErrorRecorder(abc.ABC):
    @abc.abstractmethod
    def report_error(self, code: int, desc: str) -> bool: ...


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = range(2)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, USER_MANAGED = range(2)


class Execution:
    """IExecutionContext.

    Attributes:
        told: number of times a shape or address was set.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.error_recorder = engine.error_recorder
        # an input with only one possible shape has it
        self._shapes: dict[str, tuple[int, ...]] = {
            name: tuple(map(int, engine.ports[name].dims))
            for name in engine.inputs
            if all(isinstance(dim, int) for dim in engine.ports[name].dims)
        }
        self._addresses: dict[str, int] = {}
        self._profile: int | None = None
        self._memory = (0, 0)
        self._rehearsed: dict[str, tuple[int, ...]] = {}
        self.told = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self._profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        self.told += 1
        least, _, most = self._engine.profiles[self._profile].shapes(self._engine.ports[name].dims)
        if len(shape) != len(least) or not all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        ):
            return self.refused(f"{name}: {shape} is not within {least} … {most}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.told += 1
        if name not in self._engine.ports or memory % 256:
            return self.refused(f"{name} at {memory:#x}")
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self._engine
        assert stream_handle == STREAM
        if self._memory[0] == 0 or self._memory[1] < engine.device_memory_size_v2:
            return self.refused("has no memory to work in")
        if missing := [n for n in engine.inputs if n not in self._shapes]:
            return self.refused(f"inputs without a shape: {missing}")
        if missing := [n for n in engine.ports if n not in self._addresses]:
            return self.refused(f"tensors without an address: {missing}")
        if engine.device.recording and self._rehearsed != self._shapes:
            return self.refused("was not run with these shapes before it is captured")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        self._rehearsed = shapes

        def perform() -> None:
            assert (shapes, addresses) == (self._shapes, self._addresses), "changed since captured"
            engine.perform(shapes, addresses)

        engine.device.issue(perform)
        return True

    def refused(self, text: str) -> bool:
        self.error_recorder.report_error(3, text)
        return False


class Engine:
    """ICudaEngine.

    Attributes:
        ran: token shape of every run.
        contexts: number of contexts created so far.
    """

    device_memory_size_v2 = SCRATCH

    def __init__(self, facts: Mapping[str, Any], device: Stream, error_recorder: Any) -> None:
        path = Path(facts["graph"])
        trees, weights = facts["weights"] is not None, facts["weights"] or {}
        placed = {name: Weight.model_validate(each) for name, each in weights.items()}
        model = graphfile.with_inputs(path.read_bytes(), placed, least=0)
        graph = ModelProto.FromString(model).graph
        self.device = device
        self.error_recorder = error_recorder
        self.inputs = tuple(value.name for value in graph.input)
        self.outputs = tuple(value.name for value in graph.output)
        self.ports = {value.name: _port(value) for value in (*graph.input, *graph.output)}
        built = profiles.EngineSizes.model_validate(facts["sizes"])
        self.profiles = profiles.profiles(built, trees=trees)
        self.ran: list[tuple[int, ...]] = []
        self.contexts: list[Execution] = []
        self._session = ort_session.load(model, path, ort_session.session_options(1))

    @property
    def num_io_tensors(self) -> int:
        return len(self.ports)

    def get_tensor_name(self, index: int) -> str:
        return tuple(self.ports)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.DEVICE

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> Execution:
        assert strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        self.contexts.append(Execution(self))
        return self.contexts[-1]

    def perform(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.ran.append(shapes["tokens"])
        feeds = {n: at(addresses[n], shapes[n], _TYPES[self.ports[n].dtype]) for n in self.inputs}
        for name, value in zip(
            self.outputs, self._session.run(list(self.outputs), feeds), strict=True
        ):
            source = feeds.get(name.removesuffix(".out"))
            if source is not None:
                assert (value.shape, value.dtype) == (source.shape, source.dtype), name
            at(addresses[name], value.shape, value.dtype)[...] = value


def at(address: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return the memory there as an array."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)


def module(device: Stream, version: str = "10.3.0") -> Any:
    """Return a stand-in for `import tensorrt`; `engines`, `plugins`: what was loaded."""
    found: Any = ModuleType("tensorrt")
    found.engines = []

    class Runtime:
        error_recorder: Any = None

        def __init__(self, logger: ILogger) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None:
            try:
                facts = json.loads(bytes(serialized_engine))
            except ValueError:
                self.error_recorder.report_error(1, "magic tag")
                return None
            found.engines.append(Engine(facts, device, self.error_recorder))
            return found.engines[-1]  # type: ignore[no-any-return]

    class Registry:
        def load_library(self, plugin_lib: str) -> object:
            found.plugins.append(plugin_lib)
            return object()

    found.plugins = []
    found.get_plugin_registry = Registry
    found.__version__ = version
    found.Runtime = Runtime
    found.Builder = found.OnnxParser = object
    for each in (
        ILogger, IErrorRecorder, TensorIOMode, TensorLocation, ExecutionContextAllocationStrategy
    ):  # fmt: skip
        setattr(found, each.__name__, each)
    return found
