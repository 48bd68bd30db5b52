"""Compiles a serialized graph to a serialized engine: parses it, sets sizes and limits, builds."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edge import log
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import BundleError, EngineError, InputError, some
from edge.ops import DEVICE_DOMAIN
from edge.runtime import memory
from edge.runtime.tensorrt import watch
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.messages import logger
from edge.runtime.tensorrt.profiles import EngineSizes, Profile

# MiB that TensorRT may use for the values of one run. Plugins declare their needs: 60 MB for a
# chunk of 256 tokens of a model with 2.8 billion parameters.
WORKSPACE = 256


_DTYPES = {
    "FLOAT": "f32",
    "HALF": "f16",
    "INT8": "i8",
    "UINT8": "u8",
    "INT32": "i32",
    "INT64": "i64",
}


@dataclass(frozen=True)
class Order:
    """Options of a build.

    Attributes:
        sizes: maximum sizes of the engine.
        workspace: limit of workspace memory, MiB.
        aliased: whether to declare outputs written in place to TensorRT (a preview feature).
        architectures: architectures to build for ahead of time, 86 for sm_86; empty for the GPU in
            this machine.
        force: whether to rebuild an engine that is in the cache.
    """

    sizes: EngineSizes
    workspace: int = WORKSPACE
    aliased: bool = False
    architectures: tuple[int, ...] = ()
    force: bool = False

    @property
    def flags(self) -> str:
        """The options as the component `flags` of an engine."""
        return f"{'aliased,' if self.aliased else ''}workspace={self.workspace}"


class GraphSource(NamedTuple):
    """A graph in the parser's form, the descriptor of its weights.bin, and its name in messages."""

    model: bytes
    weights: int | None
    file: str


class EnginePort(NamedTuple):
    """Type and dimensions of a network's input or output: numbers or symbols, -1 if unknown."""

    dtype: str
    dims: tuple[int | str, ...]


class CompiledEngine(NamedTuple):
    """A serialized engine, the timing cache (may be empty), and the network's ports."""

    engine: memoryview
    timings: bytes
    inputs: dict[str, EnginePort]
    outputs: dict[str, EnginePort]


def compile_graph(
    trt: TensorRT,
    source: GraphSource,
    order: Order,
    profiles: tuple[Profile, ...],
    *,
    timings: bytes = b"",
    more_said: Callable[[], str] = str,
    report: log.Progress = lambda *_: None,
    stop: threading.Event | None = None,
) -> CompiledEngine:
    """Build an engine on the calling thread. `more_said` returns the plugin library's last error.

    Raises BundleError if the source is not a graph, EngineError if TensorRT cannot parse a node or
    refuses the sizes or the graph, KeyboardInterrupt once `stop` is set.
    """
    stop = threading.Event() if stop is None else stop
    log = logger(trt.module)
    log.take()
    report("parsing", 0, 1)
    network = ParsedNetwork(trt, log)
    with ExitStack() as stack:
        folder = stack.enter_context(weights_beside(source.weights))
        network.parse(source.model, folder, source.file)
        inputs, outputs = network.ports()
        if not inputs or not outputs:
            raise BundleError("is not a graph: it has no inputs or outputs", file=source.file)
        config = network.config(inputs, profiles)
        _configure(trt, config, order)
        config.progress_monitor = watch.monitor(trt.module, report, stop)
        timing_cache = _use_timings(trt, config, order, timings)
        engine = network.builder.build_serialized_network(network.definition, config)
        if stop.is_set():
            raise KeyboardInterrupt
        if engine is None:
            messages = "; ".join(filter(None, (_messages(log), more_said())))
            raise EngineError(
                f"{trt.title} did not build the engine: {messages}",
                file=source.file,
                remedy="if memory ran out: lower --chunk, --batch, --capacity or --workspace, "
                "or stop other programs",
            )
        new_timings = b"" if timing_cache is None else bytes(timing_cache.serialize())
    # a view of TensorRT's memory, not a copy: an engine is as large as the weights
    return CompiledEngine(memoryview(engine), new_timings, inputs, outputs)


def _configure(trt: TensorRT, config: Any, order: Order) -> None:
    pools = trt.module.MemoryPoolType
    config.set_memory_pool_limit(pools.WORKSPACE, order.workspace << 20)
    # the ops define fp32 sums; by default TensorRT multiplies in tf32, with 10 bits of mantissa
    config.clear_flag(trt.module.BuilderFlag.TF32)
    if order.architectures:
        config.num_compute_capabilities = len(order.architectures)
        for index, sm in enumerate(order.architectures):
            config.set_compute_capability(_capability(trt.module, sm), index)
    else:
        # memory for timing tactics; on a Jetson it is shared with the CPU
        free = memory.available_bytes()
        if free is not None:
            config.set_memory_pool_limit(pools.TACTIC_DRAM, free // 2)
    if order.aliased:
        config.set_preview_feature(trt.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def _use_timings(trt: TensorRT, config: Any, order: Order, timings: bytes) -> Any:
    """Set the timing cache of earlier builds and return it, or None; it must outlive the build.

    TensorRT for RTX times nothing when it builds, and creating its cache needs a GPU.
    """
    if trt.kind == "rtx" or order.architectures:
        return None
    for data in (timings, b""):  # start empty if TensorRT refuses it, such as another GPU's
        timing_cache = config.create_timing_cache(data)
        if timing_cache is not None and config.set_timing_cache(timing_cache, False):
            return timing_cache
    return None


def _capability(module: Any, sm: int) -> Any:
    capability = getattr(module.ComputeCapability, f"SM{sm}", None)
    if capability is None:
        known = [name for name in module.ComputeCapability.__members__ if name.startswith("SM")]
        raise InputError(
            f"TensorRT for RTX does not build for sm_{sm}",
            field="--sm",
            remedy=f"one of {', '.join(name.removeprefix('SM') for name in known)}",
        )
    return capability


class ParsedNetwork:
    """A parsed network with the objects that must outlive it.

    It is strongly typed, so TensorRT does not choose precisions.
    """

    def __init__(self, trt: TensorRT, log: Any) -> None:
        self._trt = trt
        self._log = log
        self.builder = trt.module.Builder(log)
        flags = 0
        # from TensorRT 11 on, all networks are strongly typed
        if trt.version < (11,):
            flags = 1 << int(trt.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        self.definition = self.builder.create_network(flags)
        # the parser owns the weights that it reads
        self._parser = trt.module.OnnxParser(self.definition, log)

    def parse(self, model: bytes, folder: Path, file: str) -> None:
        """Parse a graph whose weights are in `folder`; `file` is for messages.

        Raises EngineError with the node and op that failed.
        """
        if self._parser.parse(model, str(folder / "model.onnx")):
            return
        errors = [self._parser.get_error(i) for i in range(self._parser.num_errors)]
        if not errors:
            raise EngineError(f"cannot be parsed: {_messages(self._log)}", file=file)
        raise _parser_error(self._trt, errors[0], file)

    def ports(self) -> tuple[dict[str, EnginePort], dict[str, EnginePort]]:
        """Return TensorRT's inputs and outputs. Symbolic dimensions of inputs keep their names."""
        net = self.definition
        return (
            _ports([net.get_input(i) for i in range(net.num_inputs)]),
            _ports([net.get_output(i) for i in range(net.num_outputs)]),
        )

    def config(self, inputs: Mapping[str, EnginePort], profiles: Sequence[Profile]) -> Any:
        """Return a builder configuration with the profiles.

        Raises EngineError if TensorRT refuses the sizes or an input has a dimension that is not a
        symbol of `profiles`.
        """
        symbols = {symbol for profile in profiles for symbol in profile.symbols}
        free = {name: [d for d in port.dims if isinstance(d, str) or d < 0]
                for name, port in inputs.items()}  # fmt: skip
        if unknown := [name for name, dims in free.items() if not symbols.issuperset(dims)]:
            raise EngineError(
                f"these inputs have dimensions of unknown size: {some(unknown)}",
                remedy="export the model again with this version",
            )
        config = self.builder.create_builder_config()
        for profile in profiles:
            optimization_profile = self.builder.create_optimization_profile()
            for name, port in inputs.items():
                optimization_profile.set_shape(name, *profile.shapes(port.dims))
            if config.add_optimization_profile(optimization_profile) < 0:
                raise EngineError(
                    f"TensorRT refuses the sizes of {profile.name!r}: {_messages(self._log)}",
                    remedy="smaller --window, --batch, --capacity or --chunk",
                )
        return config


def _ports(tensors: list[Any]) -> dict[str, EnginePort]:
    ports = {}
    for tensor in tensors:
        dims = [
            (tensor.get_dimension_name(axis) or size) if size < 0 else size
            for axis, size in enumerate(tensor.shape)
        ]
        dtype = tensor.dtype.name
        ports[tensor.name] = EnginePort(_DTYPES.get(dtype, dtype), tuple(dims))
    return ports


def _messages(log: Any) -> str:
    return log.take(warnings=True) or "it did not say why"


def _parser_error(trt: TensorRT, error: Any, file: str) -> EngineError:
    node, op = error.node_name(), error.node_operator()
    description = error.desc().strip()
    remedy = f"report it, with {trt.title}"
    if "lugin not found" in description or "importer" in description.lower():
        description += f"; no plugin is loaded for {op!r} of {DEVICE_DOMAIN}"
        remedy = "the plugin library is of another version than the bundle: make plugins"
    location = (
        " of ".join(filter(None, (node and f"node {node}", op and f"op {op}"))) or "the graph"
    )
    return EngineError(
        f"{trt.title} cannot parse {location}: {description}",
        file=file,
        field=node or None,
        remedy=remedy,
    )


@contextmanager
def weights_beside(weights: int | None) -> Iterator[Path]:
    """Yield a temporary folder whose weights.bin links to the file of the checked descriptor."""
    with tempfile.TemporaryDirectory(prefix="mamba-edge-") as name:
        folder = Path(name)
        if weights is not None:
            link = f"/proc/{os.getpid()}/fd/{weights}"
            if not os.path.exists(link):
                raise BundleError("cannot be handed to a parser: /proc is missing", file=link)
            (folder / WEIGHT_FILE).symlink_to(link)
        yield folder
