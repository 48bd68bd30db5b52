"""`edge build`: builds an engine from a bundle's device graph and stores it in the cache.

TensorRT builds with plugins, on the GPU that will run the engine. TensorRT for RTX builds from
standard ops only, also ahead of time for GPUs elsewhere. Both share this code and differ in the
graph that is parsed.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge import log
from edge.bundle import Bundle
from edge.bundle.kernels import open_plan
from edge.bundle.reader import WEIGHT_FILE
from edge.errors import EngineError
from edge.launch import Weight
from edge.plugins.tensorrt import blob
from edge.runtime import graph, memory
from edge.runtime.tensorrt import cache, graphfile, machine, sealed, watch
from edge.runtime.tensorrt.bindings import TensorRT
from edge.runtime.tensorrt.compile import CompiledEngine, GraphSource, Order, compile_graph
from edge.runtime.tensorrt.library import PluginLibrary
from edge.runtime.tensorrt.profiles import EngineSizes, Profile, profiles

# Memory of TensorRT and CUDA themselves, and copies of each weight in the engine: parsed, on the
# device, in the engine. Estimates: no build was measured on a GPU.
_LIBRARIES = 700 << 20
_COPIES = 3


@dataclass(frozen=True)
class Built:
    """An engine in the cache.

    Attributes:
        seconds: build time; 0 if the engine was already in the cache.
        notes: problems that did not stop the build.
    """

    path: Path
    key: str
    components: Mapping[str, str]
    sizes: EngineSizes
    profiles: tuple[Profile, ...]
    engine_bytes: int
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


def build(
    bundle: Bundle,
    order: Order,
    trt: TensorRT,
    library: PluginLibrary | None,
    gpu: Any,
    on_progress: log.Progress = lambda *_: None,
) -> Built:
    """Return the engine from the cache, or build it. `library` None builds without plugins.

    `on_progress(activity, done, total)` reports "compiling kernels" and "parsing", then TensorRT's
    phases by name. It is called on the build thread.

    Raises BundleError or EngineError if the graph or kernels are missing, the cache is not
    writable, memory is short, or TensorRT refuses the graph. After any exception or interrupt the
    cache is unchanged.
    """
    job = EngineBuild(bundle, order, trt, library, gpu, on_progress)
    path = None if order.force else cache.there(job.components, order.sizes)
    if path is not None:
        with sealed.read(path) as cached:
            return job.built(path, len(cached.body))
    sealed.check_writable()
    job.check_memory()
    stop = threading.Event()
    started = time.monotonic()
    compiled = watch.Interruptible(lambda: job.compiled(stop), stop).result()
    seconds = time.monotonic() - started
    facts = {"seconds": round(seconds, 1), "profiles": [profile.name for profile in job.profiles]}
    path = cache.store(job.components, order.sizes, compiled.engine, facts)
    notes = _store_timings(job.components, compiled.timings)
    return job.built(path, len(compiled.engine), seconds, notes)


class EngineBuild:
    """One build: the components that the engine depends on, and the steps that build it."""

    def __init__(
        self,
        bundle: Bundle,
        order: Order,
        trt: TensorRT,
        library: PluginLibrary | None,
        gpu: Any,
        report: log.Progress,
    ) -> None:
        self._bundle, self._order, self._trt = bundle, order, trt
        self._library, self._gpu, self._report = library, gpu, report
        # without plugins the graph runs only chains
        self.profiles = profiles(order.sizes, trees=library is not None)
        self._kernels = b"" if library is None else kernels_of(bundle, gpu.sm, report)
        components = machine.components(bundle, trt, library, gpu)
        if order.architectures:
            components = machine.ahead(components, order.architectures)
        kernels = blob.identity(self._kernels) if self._kernels else ""
        self.components = components | {"kernels": kernels, "flags": order.flags}

    def built(
        self, path: Path, size: int, seconds: float = 0.0, notes: tuple[str, ...] = ()
    ) -> Built:
        sizes, components = self._order.sizes, self.components
        key = cache.key(components, sizes)
        return Built(path, key, components, sizes, self.profiles, size, seconds, notes)

    def compiled(self, stop: threading.Event) -> CompiledEngine:
        """Build the engine on the calling thread."""
        if self._gpu is not None:
            self._gpu.memory()  # makes the GPU's context current on this thread
        with ExitStack() as stack:
            if self._library is not None:
                self._library.prepare(self._kernels, aliased=self._order.aliased)
                stack.callback(self._library.prepare, b"", aliased=False)
            return compile_graph(
                self._trt,
                self._source(),
                self._order,
                self.profiles,
                timings=cache.read_timings(self.components),
                more_said=lambda: self._library.last_error() if self._library else "",
                report=self._report,
                stop=stop,
            )

    def _source(self) -> GraphSource:
        data, label = self._graph
        entry, weights = self._bundle.manifest.entry(WEIGHT_FILE), self._weights
        model = graphfile.form_for(self._trt, data, label, weights)
        return GraphSource(model, None if entry is None else self._bundle.fd(WEIGHT_FILE), label)

    @functools.cached_property
    def _graph(self) -> tuple[bytes, str]:
        """The bundle's device graph, checked, and its file name for messages."""
        bundle, file = self._bundle, machine.graph_file(self._bundle)
        label = f"{bundle.path}/{file}"
        entry, data = bundle.manifest.entry(WEIGHT_FILE), bundle.read(file)
        graph.check(data, {} if entry is None else {WEIGHT_FILE: entry.size}, label, plugins=True)
        graphfile.check(data, label)
        return data, label

    @functools.cached_property
    def _weights(self) -> Mapping[str, Weight]:
        return open_plan(self._bundle).weights

    @property
    def needed_bytes(self) -> int:
        """Estimated peak memory of the build in bytes."""
        entry = self._bundle.manifest.entry(WEIGHT_FILE)
        constants = 0 if entry is None else entry.size
        if self._trt.kind == "tensorrt":
            constants = graphfile.constant_bytes(self._graph[0], self._weights)
        return _LIBRARIES + _COPIES * constants + (self._order.workspace << 20)

    def check_memory(self) -> None:
        """Raise EngineError if the build would run out of memory.

        Compares with MemAvailable: on a Jetson, CUDA does not count the page cache as free.
        """
        remedy = f"lower --workspace, {memory.REMEDY}"
        plan, file = {"total": self.needed_bytes}, self._bundle.path
        memory.check_fits(plan, file=file, remedy=remedy)
        if self._gpu is not None and not self._gpu.integrated:
            memory.check_fits(plan, available=self._gpu.memory()[0], file=file, remedy=remedy)


def _store_timings(components: Mapping[str, str], timings: bytes) -> tuple[str, ...]:
    """Store the timing cache. A failure becomes a note, since the engine is built anyway."""
    try:
        if timings:
            cache.write_timings(components, timings)
    except EngineError as problem:
        return (f"the timing cache was not saved: {problem}",)
    return ()


def kernels_of(bundle: Bundle, sm: int, report: log.Progress = lambda *_: None) -> bytes:
    """Return the bundle's kernels for this GPU, or kernels compiled here, packed as one blob."""
    # imported by name: the compiler is not part of the runtime
    fallback: Any = importlib.import_module("edge.plugins.compiler.fallback")
    plan = open_plan(bundle)
    source = fallback.kernels_for(bundle, plan, sm, partial(report, "compiling kernels"))
    return blob.pack(sm, {variant.key: source.get(variant) for variant in plan.variants})
