"""Opens the engine that `edge build` made of a bundle on this machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from edge.bundle.kernels import open_plan
from edge.errors import EngineError
from edge.launch import LaunchPlan, Pointer
from edge.runtime.cuda.device import Exclusive
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.cuda.opening import load_executor
from edge.runtime.layout import Identity, StateLayout
from edge.runtime.tensorrt import bindings, cache, library, machine, profiles, tensors
from edge.runtime.tensorrt.bindings import Kind, TensorRT
from edge.runtime.tensorrt.contexts import EngineContexts
from edge.runtime.tensorrt.executor import GraphExecutor
from edge.runtime.tensorrt.library import PluginLibrary
from edge.runtime.tensorrt.profiles import EngineSizes

if TYPE_CHECKING:
    from edge.bundle import Bundle


class TensorRTEngine(CudaEngine):
    """The device graph of a bundle on one device. States, inputs and recorded graphs are the
    CUDA engine's; so are state files.
    """

    name = "tensorrt"
    executor: GraphExecutor

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """A capacity that is not asked for is at most what the engine was built for."""
        layout = super()._layout(batch, window, capacity)
        if capacity is None and layout.capacity > self.executor.sizes.capacity:
            return super()._layout(batch, window, self.executor.sizes.capacity)
        return layout

    @property
    def longest_window(self) -> int:
        """What the graph was built for."""
        return self.executor.sizes.window

    @property
    def finds_argmax(self) -> bool:
        """The graph always ends in them."""
        return True


def applying(plan: LaunchPlan, inputs: Collection[str]) -> tuple[LaunchPlan, tuple[int, ...]]:
    """The plan with those constants alone that its settle program reads or that are `inputs` of the
    engine, and which variants that program launches: all that has to be on the device besides.
    """
    launches = [
        plan.launches[index]
        for program in plan.programs
        if program.kind == "settle"
        for index in program.launches
    ]
    read = {
        (argument.space, argument.name)
        for launch in launches
        for argument in launch.arguments
        if isinstance(argument, Pointer)
    }
    weights = {name: w for name, w in plan.weights.items()
               if ("weight", name) in read or name in inputs}  # fmt: skip
    inline = {name: c for name, c in plan.inline.items() if ("inline", name) in read}
    reduced = plan.model_copy(update={"weights": weights, "inline": inline})
    return reduced, tuple(sorted({launch.variant for launch in launches}))


def from_bundle(bundle: Bundle, device: Any = None) -> TensorRTEngine:
    """The engine built last; `device` None is the GPU that EDGE_DEVICE means.

    Raises BundleError: no plan or graph, no kernels for this GPU; EngineError: no TensorRT, no
    plugin library, no GPU, no engine that can be used here (with the command that builds one), no
    memory.
    """
    trt, plugins = _libraries(built_kind(bundle))
    plan = open_plan(bundle)
    machine.graph_file(bundle)
    gpu = machine.open_gpu() if device is None else device
    here, manifest = _here(bundle, trt, plugins, gpu), bundle.manifest
    usual = profiles.sizes(manifest.model, manifest.limits.chunk)
    flags = ("--rtx",) if plugins is None else ()
    with cache.find(bundle.path, here, usual, *flags) as found:
        sizes = EngineSizes.model_validate(found.header["sizes"], strict=True)
        contexts = EngineContexts(
            trt,
            found.body,
            gpu,
            profiles.profiles(sizes, trees=plugins is not None),
            str if plugins is None else plugins.last_error,
        )
    _check_names(contexts, bundle, plan, cache.command(bundle.path, sizes, *flags))
    exclusive = Exclusive(gpu)
    executor = GraphExecutor(
        load_executor(bundle, plan, exclusive, *applying(plan, contexts.inputs)),
        contexts,
        sizes,
        rebuild=lambda larger: cache.command(bundle.path, larger, *flags),
    )
    return TensorRTEngine(
        manifest.model,
        exclusive,
        executor,
        chunk=min(manifest.limits.chunk, sizes.chunk),
        identity=Identity.of_bundle(bundle),
        state_dtypes=manifest.state_dtypes,
    )


def built_kind(bundle: Bundle) -> Kind:
    """Which library the bundle's engine was built with last; TensorRT where none was."""
    last = cache.newest(cache.entries(bundle.fingerprint))
    return "rtx" if last and last.components.get("kind") == "rtx" else "tensorrt"


def _libraries(kind: Kind) -> tuple[TensorRT, PluginLibrary | None]:
    trt = bindings.load(kind)
    if kind == "rtx":
        return trt, None
    plugins = library.open_library()
    library.register(trt, plugins)
    return trt, plugins


def _here(bundle: Bundle, trt: TensorRT, plugins: PluginLibrary | None, gpu: Any) -> dict[str, str]:
    """The facts about this machine that an engine depends on."""
    here = machine.components(bundle, trt, plugins, gpu)
    if plugins is None:
        # built ahead of time, for several GPUs by their architecture
        here = {name: here[name] for name in here if name not in ("gpu", "driver")}
        lists = {e.components.get("sm", "") for e in cache.entries(bundle.fingerprint)}
        here["sm"] = next((each for each in lists if here["sm"] in each.split(",")), here["sm"])
    return here


def _check_names(contexts: EngineContexts, bundle: Bundle, plan: LaunchPlan, command: str) -> None:
    """Raises EngineError for an engine whose tensors are not those of the bundle's plan."""
    inputs, outputs = tensors.names(plan, StateLayout.of(bundle.manifest.model))
    strange = set(contexts.inputs) - inputs - set(plan.weights)
    strange |= set(contexts.outputs) ^ outputs
    if strange:
        raise EngineError(
            f"the engine was not built from this bundle's graph: {', '.join(sorted(strange))}",
            remedy=f"build it again: {command}",
        )
