"""From a graph in bytes to an engine in bytes: parsed, told of sizes and limits, built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from edge.errors import EngineError, InputError
from edge.runtime import memory
from edge.runtime.tensorrt import onnxfile, watch
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.network import Network, check_ports, weights_beside
from edge.runtime.tensorrt.profiles import Profile, Sizes
from edge.runtime.tensorrt.watch import Report

# What TensorRT may take for the values of one run, MiB. Plugins say what they need; of a chunk of
# 256 tokens of a model of 2.8 billion parameters that is 60 MB.
WORKSPACE = 256


@dataclass(frozen=True)
class Order:
    """What is to be built.

    Attributes:
        workspace: MiB.
        aliased: TensorRT is told of outputs that are written in place (a preview feature).
        architectures: GPUs to build for ahead of time, 86 for sm_86; none is the GPU here.
        force: also where the engine is there already.
    """

    sizes: Sizes
    workspace: int = WORKSPACE
    aliased: bool = False
    architectures: tuple[int, ...] = ()
    force: bool = False

    @property
    def flags(self) -> str:
        """As a component of an engine."""
        return f"{'aliased,' if self.aliased else ''}workspace={self.workspace}"


class Source(NamedTuple):
    """A graph as the parser is to see it, its open weights.bin, and its name in messages."""

    model: bytes
    weights: int | None
    file: str


class Compiled(NamedTuple):
    """An engine, what the builder measured (empty where it did not), and what it said on the way.

    Attributes:
        inputs, outputs: as TensorRT sees them.
    """

    engine: memoryview
    timings: bytes
    inputs: dict[str, onnxfile.Port]
    outputs: dict[str, onnxfile.Port]


def compile_graph(
    trt: TensorRT,
    source: Source,
    order: Order,
    profiles: tuple[Profile, ...],
    *,
    timings: bytes = b"",
    more_said: Callable[[], str] = str,
    report: Report = lambda _what, _done: None,
    stop: threading.Event | None = None,
) -> Compiled:
    """Build an engine on the thread that calls. `more_said`: what the plugin library says of it.

    Raises EngineError: a node that is not understood, sizes or a graph that TensorRT refuses;
    KeyboardInterrupt after `stop`.
    """
    stop = threading.Event() if stop is None else stop
    log = watch.logger(trt.module)
    log.forget()
    report("parsing", 0.0)
    graph = onnxfile.read(source.model, source.file)
    network = Network(trt, log)
    with ExitStack() as stack:
        folder = stack.enter_context(weights_beside(source.weights))
        network.parse(source.model, folder, source.file)
        inputs, outputs = check_ports(network, graph)
        config = network.config(graph.inputs, profiles)
        _configure(trt, config, order)
        config.progress_monitor = watch.monitor(trt.module, report, stop)
        measured = _use_timings(trt, config, order, timings)
        engine = network.builder.build_serialized_network(network.definition, config)
        if stop.is_set():
            raise KeyboardInterrupt
        if engine is None:
            said = "; ".join(filter(None, (log.said(), more_said())))
            raise EngineError(
                f"{trt.title} did not build the engine: {said}",
                file=source.file,
                remedy="where memory ran out: lower --chunk, --batch, --capacity or --workspace, "
                "or stop other programs",
            )
        kept = b"" if measured is None else bytes(measured.serialize())
    # TensorRT's own memory: an engine has the size of the weights
    return Compiled(memoryview(engine), kept, inputs, outputs)


def _configure(trt: TensorRT, config: Any, order: Order) -> None:
    pools = trt.module.MemoryPoolType
    config.set_memory_pool_limit(pools.WORKSPACE, order.workspace << 20)
    # the ops' sums are stated in fp32; by default TensorRT takes tf32, with 10 bits, for products
    config.clear_flag(trt.module.BuilderFlag.TF32)
    if order.architectures:
        config.num_compute_capabilities = len(order.architectures)
        for index, sm in enumerate(order.architectures):
            config.set_compute_capability(_capability(trt.module, sm), index)
    else:
        # what tactics are tried with; on a Jetson it is the CPU's memory too
        free = memory.available_bytes()
        if free is not None:
            config.set_memory_pool_limit(pools.TACTIC_DRAM, free // 2)
    if order.aliased:
        config.set_preview_feature(trt.module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)


def _use_timings(trt: TensorRT, config: Any, order: Order, timings: bytes) -> Any:
    """Give the builder what it measured before: the cache, which must outlive the build, or None.

    TensorRT for RTX tries nothing out when it builds, and asking for its cache needs a GPU.
    """
    if trt.kind == "rtx" or order.architectures:
        return None
    for data in (timings, b""):  # what it refuses, another GPU's say, it does without
        made = config.create_timing_cache(data)
        if made is not None and config.set_timing_cache(made, False):
            return made
    return None


def _capability(module: Any, sm: int) -> Any:
    found = getattr(module.ComputeCapability, f"SM{sm}", None)
    if found is None:
        known = [name for name in module.ComputeCapability.__members__ if name.startswith("SM")]
        raise InputError(
            f"TensorRT for RTX does not build for sm_{sm}",
            field="--sm",
            remedy=f"one of {', '.join(name.removeprefix('SM') for name in known)}",
        )
    return found
