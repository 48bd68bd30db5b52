"""`edge build`: from a bundle's device graph to an engine in the cache.

TensorRT's engines are built on the GPU they run on, of plugins. TensorRT for RTX builds of standard
ops alone, also ahead of time for GPUs that are elsewhere: the same road, but for what is parsed.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.bundle import Bundle
from edge.bundle.kernels import WEIGHT_FILE, open_plan
from edge.errors import EngineError, InputError
from edge.plugins.tensorrt import blob
from edge.runtime import memory
from edge.runtime.tensorrt import cache, machine, onnxfile, sealed, watch
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.library import PluginLibrary
from edge.runtime.tensorrt.network import Network, check_ports, weights_beside
from edge.runtime.tensorrt.profiles import Profile, Sizes, profiles
from edge.runtime.tensorrt.watch import Report

# What TensorRT may take for the values of one run, MiB. Plugins say what they need; of a chunk of
# 256 tokens of a model of 2.8 billion parameters that is 60 MB.
WORKSPACE = 256
# Of TensorRT and CUDA themselves, and of each weight: as parsed, on the device, in the engine.
# Estimated: no build was measured on a GPU.
_LIBRARIES = 700 << 20
_COPIES = 3


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


@dataclass(frozen=True)
class Built:
    """An engine in the cache.

    Attributes:
        seconds: what building took; 0 when it was there already.
    """

    path: Path
    key: str
    components: Mapping[str, str]
    sizes: Sizes
    profiles: tuple[Profile, ...]
    engine_bytes: int
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())


def build(
    bundle: Bundle,
    order: Order,
    trt: TensorRT,
    library: PluginLibrary | None,
    gpu: Any,
    report: Report = lambda _what, _done: None,
) -> Built:
    """The engine, built where the cache does not have it. `library` None: without plugins.

    Raises BundleError, EngineError: no graph, no kernels, a cache that cannot be written, too
    little memory, a graph that TensorRT refuses. Whatever is raised, an interrupt too, the cache is
    as it was.
    """
    job = _Job(bundle, order, trt, library, gpu, report)
    path = None if order.force else cache.there(job.components, order.sizes)
    if path is not None:
        with sealed.read(path) as found:
            return job.built(path, len(found.body))
    sealed.check_writable()
    _check_memory(bundle, order, gpu)
    stop = threading.Event()
    started = time.monotonic()
    engine = watch.Interruptible(lambda: job.engine(stop), stop).result()
    seconds = time.monotonic() - started
    facts = {"seconds": round(seconds, 1), "profiles": [each.name for each in job.profiles]}
    path = cache.store(job.components, order.sizes, engine, facts)
    return job.built(path, len(engine), seconds)


class _Job:
    """One build: what it depends on, and the steps."""

    def __init__(
        self,
        bundle: Bundle,
        order: Order,
        trt: TensorRT,
        library: PluginLibrary | None,
        gpu: Any,
        report: Report,
    ) -> None:
        self._bundle, self._order, self._trt = bundle, order, trt
        self._library, self._gpu, self._report = library, gpu, report
        # function bodies run chains alone
        self.profiles = profiles(order.sizes, trees=library is not None)
        self._kernels = b"" if library is None else _kernels(bundle, gpu.sm, report)
        self._notes: list[str] = []
        found = machine.components(bundle, trt, library, gpu)
        if order.architectures:
            found = machine.ahead(found, order.architectures)
        kernels = {"kernels": blob.identity(self._kernels)} if self._kernels else {"kernels": ""}
        self.components = found | kernels | {"flags": order.flags}

    def built(self, path: Path, size: int, seconds: float = 0.0) -> Built:
        sizes, components = self._order.sizes, self.components
        key = cache.key(components, sizes)
        notes = tuple(self._notes)
        return Built(path, key, components, sizes, self.profiles, size, seconds, notes)

    def engine(self, stop: threading.Event) -> bytes:
        """Build it, on whatever thread this is."""
        if self._gpu is not None:
            self._gpu.memory()  # makes its context this thread's
        log = watch.logger(self._trt.module)
        network = Network(self._trt, log)
        with ExitStack() as stack:
            if self._library is not None:
                self._library.prepare(self._kernels, aliased=self._order.aliased)
                stack.callback(self._library.prepare, b"", aliased=False)
            self._report("parsing", 0.0)
            graph = self._parsed(network, stack)
            config = network.config(graph.inputs, self.profiles)
            self._configure(config)
            config.progress_monitor = watch.monitor(self._trt.module, self._report, stop)
            timings = self._timings(config)
            engine = network.builder.build_serialized_network(network.definition, config)
            if stop.is_set():
                raise KeyboardInterrupt
            if engine is None:
                raise self._failed(log)
            if timings:
                self._keep_timings(config)
        return bytes(engine)

    def _parsed(self, network: Network, stack: ExitStack) -> onnxfile.Graph:
        bundle = self._bundle
        file = machine.graph_file(bundle)
        where = f"{bundle.path}/{file}"
        model = _form(bundle.read(file), self._trt, with_plugins=self._library is not None)
        graph = onnxfile.read(model, where)
        weights = None
        if bundle.manifest.entry(WEIGHT_FILE) is not None:
            weights = bundle.fd(WEIGHT_FILE)
        network.parse(model, stack.enter_context(weights_beside(weights)), where)
        check_ports(network, (graph.inputs, graph.outputs))
        return graph

    def _configure(self, config: Any) -> None:
        module, order = self._trt.module, self._order
        config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, order.workspace << 20)
        if order.architectures:
            config.num_compute_capabilities = len(order.architectures)
            for index, sm in enumerate(order.architectures):
                config.set_compute_capability(_capability(module, sm), index)
        else:
            # what tactics are tried with: also the CPU's, on a Jetson
            free = memory.available_bytes()
            if free is not None:
                config.set_memory_pool_limit(module.MemoryPoolType.TACTIC_DRAM, free // 2)
        if order.aliased:
            config.set_preview_feature(module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)

    def _timings(self, config: Any) -> bool:
        """Give the builder what it measured before. Not without a GPU: asking for it needs one."""
        if self._order.architectures or self._trt.kind == "rtx":
            return False
        made = config.create_timing_cache(cache.read_timings(self.components))
        return bool(config.set_timing_cache(made, False))

    def _keep_timings(self, config: Any) -> None:
        try:
            data = bytes(config.get_timing_cache().serialize())
            cache.write_timings(self.components, data)
        except (EngineError, AttributeError) as problem:  # the engine is made all the same
            self._notes.append(f"the builder's timings were not kept: {problem}")

    def _failed(self, log: Any) -> EngineError:
        why = log.said()
        plugins = self._library.last_error() if self._library else ""
        return EngineError(
            f"{self._trt.title} did not build the engine: {why}{f'; {plugins}' if plugins else ''}",
            file=self._bundle.path,
            remedy="where memory ran out: lower --chunk, --batch, --capacity or --workspace, or "
            "stop other programs",
        )


def _form(model: bytes, trt: TensorRT, *, with_plugins: bool) -> bytes:
    """The graph as this parser has to see it."""
    if with_plugins:
        return onnxfile.bare(model) if trt.bare_nodes else model
    # by name: inlining needs onnx, which no Jetson has
    try:
        graph: Any = importlib.import_module("edge.plugins.tensorrt.graph")
        onnx: Any = importlib.import_module("onnx")
    except ModuleNotFoundError as missing:
        raise EngineError(
            f"{trt.title} has no plugins and needs the graph in standard ops, which needs the "
            f"package {missing.name}",
            remedy="pip install 'mamba-edge[export]'",
        ) from None
    inlined = graph.inlined(onnx.ModelProto.FromString(model))
    data: bytes = inlined.SerializeToString(deterministic=True)
    return data


def _kernels(bundle: Bundle, sm: int, report: Report) -> bytes:
    """The bundle's kernels for this GPU, or compiled here, in one piece."""
    # by name: what compiles is no part of the runtime
    fallback: Any = importlib.import_module("edge.plugins.compiler.fallback")
    plan = open_plan(bundle)
    source = fallback.kernels_for(
        bundle, plan, sm, lambda done, of: report("compiling kernels", done / max(1, of))
    )
    return blob.pack(sm, {each.key: source.get(each) for each in plan.variants})


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


def needed_bytes(bundle: Bundle, order: Order) -> int:
    """What a build takes at most, estimated."""
    weights = bundle.manifest.entry(WEIGHT_FILE)
    return _LIBRARIES + _COPIES * (weights.size if weights else 0) + (order.workspace << 20)


def _check_memory(bundle: Bundle, order: Order, gpu: Any) -> None:
    """Raises EngineError where a build would run out of memory. MemAvailable counts: what CUDA
    calls free on a Jetson leaves out the page cache.
    """
    remedy = (
        "lower --workspace, use a bundle of fewer bits (edge export --quant w4), or stop other "
        "programs"
    )
    plan = {"total": needed_bytes(bundle, order)}
    memory.check_fits(plan, file=bundle.path, remedy=remedy)
    if gpu is not None and not gpu.integrated:
        memory.check_fits(plan, available=gpu.memory()[0], file=bundle.path, remedy=remedy)
