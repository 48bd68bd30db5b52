"""A stand-in for TensorRT's builder where it is missing: it parses with onnx and builds nothing.

It enforces TensorRT's documentation on its caller: object lifetimes, flags of each version, and
where weights are looked up.
"""

from __future__ import annotations

import abc
import enum
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from onnx import ModelProto, TensorProto

_TYPES = {
    TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF", TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32", TensorProto.INT64: "INT64",
}  # fmt: skip
GIVEN, MEASURED = b"timings: ", b"measured"


@dataclass
class Seen:
    """The calls that the stand-in received, and its answers.

    Attributes:
        builds: whether a build succeeds.
        refuses: timing caches of another GPU.
    """

    builds: bool = True
    refuses: bytes | None = None
    network_flags: int = 0
    model: ModelProto = field(default_factory=ModelProto)
    weights: bytes = b""
    profiles: list[dict[str, Any]] = field(default_factory=list)
    pools: dict[str, int] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    previews: dict[str, bool] = field(default_factory=dict)
    timings: bytes = b""
    progress: list[bool] = field(default_factory=list)


class NetworkDefinitionCreationFlag(enum.IntEnum):
    STRONGLY_TYPED = 1


class ILogger(abc.ABC):
    class Severity(enum.IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)

    @abc.abstractmethod
    def log(self, severity: Severity, message: str) -> None: ...


class IProgressMonitor(abc.ABC):
    @abc.abstractmethod
    def step_complete(self, name: str, step: int) -> bool: ...


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> bytes:
        return GIVEN + MEASURED


class Profile(dict[str, Any]):
    def set_shape(self, name: str, least: Any, likely: Any, most: Any) -> None:
        assert all(a <= b <= c for a, b, c in zip(least, likely, most, strict=True)), name
        self[name] = (least, likely, most)


class Config:
    progress_monitor: Any

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.timings: weakref.ref[TimingCache] | None = None

    def add_optimization_profile(self, profile: Profile) -> int:
        self.seen.profiles.append(dict(profile))
        return len(self.seen.profiles) - 1

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.seen.pools[pool] = size

    def clear_flag(self, flag: str) -> None:
        self.seen.cleared.add(flag)

    def set_preview_feature(self, feature: str, on: bool) -> None:
        self.seen.previews[feature] = on

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache(data)

    def set_timing_cache(self, made: TimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch, "another GPU's timings are of no use"
        if self.seen.refuses is not None and made.data == self.seen.refuses:
            return False
        self.timings = weakref.ref(made)
        return True


class Network:
    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))

    def get_input(self, index: int) -> Any:
        return self.inputs[index]

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class Parser:
    num_errors = 0

    def __init__(self, seen: Seen, network: Network) -> None:
        self._seen, self._network = seen, network

    def parse(self, model: bytes, path: str) -> bool:
        self._seen.model = parsed = ModelProto.FromString(model)
        self._seen.weights = (Path(path).parent / "weights.bin").read_bytes()
        self._network.inputs = [_tensor(value) for value in parsed.graph.input]
        self._network.outputs = [_tensor(value) for value in parsed.graph.output]
        return True


def _tensor(value: Any) -> Any:
    tensor = value.type.tensor_type
    dims = tuple(-1 if dim.dim_param else dim.dim_value for dim in tensor.shape.dim)
    dtype = SimpleNamespace(name=_TYPES[tensor.elem_type])
    symbols = [dim.dim_param or None for dim in tensor.shape.dim]
    return SimpleNamespace(
        name=value.name, dtype=dtype, shape=dims, get_dimension_name=symbols.__getitem__
    )


class Builder:
    def __init__(self, seen: Seen, log: Any) -> None:
        self._seen, self._log = seen, log

    def create_network(self, flags: int) -> Network:
        self._seen.network_flags = flags
        return Network()

    def create_builder_config(self) -> Config:
        return Config(self._seen)

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        monitor = config.progress_monitor
        monitor.phase_start("Building engine", None, 2)
        self._seen.progress += [monitor.step_complete("Building engine", step) for step in (0, 1)]
        monitor.phase_finish("Building engine")
        timings = config.timings() if config.timings else None
        assert timings is not None, "the timing cache was destroyed before the engine was built"
        self._seen.timings = timings.data
        if not self._seen.builds:
            self._log.log(ILogger.Severity.ERROR, "[no tactic for layers.0]")
            return None
        return b"engine of " + str(len(network.inputs)).encode()


def module(seen: Seen) -> ModuleType:
    """Return a stand-in for `import tensorrt`."""
    names = ModuleType("tensorrt")
    flags = SimpleNamespace(TF32="TF32")
    pools = SimpleNamespace(WORKSPACE="workspace", TACTIC_DRAM="tactics")
    previews = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")
    names.__dict__.update(
        ILogger=ILogger,
        IProgressMonitor=IProgressMonitor,
        NetworkDefinitionCreationFlag=NetworkDefinitionCreationFlag,
        BuilderFlag=flags,
        MemoryPoolType=pools,
        PreviewFeature=previews,
        Builder=lambda log: Builder(seen, log),
        OnnxParser=lambda network, log: Parser(seen, network),
    )
    return names
