"""Opens the engine that `edge build` built from a bundle on this machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from edge.bundle.kernels import open_plan
from edge.errors import EngineError, some
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
    """Runs a bundle's device graph with TensorRT. States, state files, inputs and recorded graphs
    are those of the CUDA engine.
    """

    name = "tensorrt"
    executor: GraphExecutor

    def _layout(self, batch: int, window: int, capacity: int | None) -> StateLayout:
        """Limit the default capacity to the one that the engine was built for."""
        layout = super()._layout(batch, window, capacity)
        if capacity is None and layout.capacity > self.executor.sizes.capacity:
            return super()._layout(batch, window, self.executor.sizes.capacity)
        return layout

    @property
    def longest_window(self) -> int:
        """Maximum window that the engine was built for."""
        return self.executor.sizes.window

    @property
    def finds_argmax(self) -> bool:
        """True: the graph always outputs the picked ids."""
        return True


def applying(plan: LaunchPlan, inputs: Collection[str]) -> tuple[LaunchPlan, tuple[int, ...]]:
    """Return what the device needs besides the engine: the plan with only the constants that its
    settle program reads or that are `inputs` of the engine, and the variants that program launches.
    """
    launches = [
        plan.launches[index]
        for program in plan.programs
        if program.kind == "settle"
        for index in program.launches
    ]
    used = {
        (argument.space, argument.name)
        for launch in launches
        for argument in launch.arguments
        if isinstance(argument, Pointer)
    }
    weights = {name: w for name, w in plan.weights.items()
               if ("weight", name) in used or name in inputs}  # fmt: skip
    inline = {name: c for name, c in plan.inline.items() if ("inline", name) in used}
    reduced = plan.model_copy(update={"weights": weights, "inline": inline})
    return reduced, tuple(sorted({launch.variant for launch in launches}))


def from_bundle(bundle: Bundle, device: Any = None) -> TensorRTEngine:
    """Open the bundle's engine that was built last; `device` None selects the GPU by EDGE_DEVICE.

    Raises BundleError if the plan, the graph or kernels for this GPU are missing; EngineError if
    TensorRT, the plugin library, the GPU, memory or a usable engine is missing, the latter with the
    command that builds one.
    """
    trt, plugins = _libraries(built_kind(bundle))
    plan = open_plan(bundle)
    machine.graph_file(bundle)
    gpu = machine.open_gpu() if device is None else device
    components, manifest = _machine_components(bundle, trt, plugins, gpu), bundle.manifest
    default_sizes = profiles.sizes(manifest.model, manifest.limits.chunk)
    flags = ("--rtx",) if plugins is None else ()
    with cache.find(bundle.path, components, default_sizes, *flags) as sealed:
        sizes = EngineSizes.model_validate(sealed.header["sizes"], strict=True)
        contexts = EngineContexts(
            trt,
            sealed.body,
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
    """Return the library that built the bundle's last engine; TensorRT if there is no engine."""
    last = cache.newest(cache.entries(bundle.fingerprint))
    return "rtx" if last and last.components.get("kind") == "rtx" else "tensorrt"


def _libraries(kind: Kind) -> tuple[TensorRT, PluginLibrary | None]:
    trt = bindings.load(kind)
    if kind == "rtx":
        return trt, None
    plugins = library.open_library()
    library.register(trt, plugins)
    return trt, plugins


def _machine_components(
    bundle: Bundle, trt: TensorRT, plugins: PluginLibrary | None, gpu: Any
) -> dict[str, str]:
    """Return the facts about this machine that an engine depends on."""
    components = machine.components(bundle, trt, plugins, gpu)
    if plugins is None:
        # may be built ahead of time for several architectures, whatever GPU and driver
        components = {
            name: components[name] for name in components if name not in ("gpu", "driver")
        }
        built_for = {e.components.get("sm", "") for e in cache.entries(bundle.fingerprint)}
        components["sm"] = next(
            (
                architectures
                for architectures in built_for
                if components["sm"] in architectures.split(",")
            ),
            components["sm"],
        )
    return components


def _check_names(contexts: EngineContexts, bundle: Bundle, plan: LaunchPlan, command: str) -> None:
    """Raise EngineError if the engine's tensors are not those of the bundle's plan."""
    inputs, outputs = tensors.names(plan, StateLayout.of(bundle.manifest.model))
    unexpected = set(contexts.inputs) - inputs - set(plan.weights)
    unexpected |= set(contexts.outputs) ^ outputs
    if unexpected:
        raise EngineError(
            f"the engine was not built from this bundle's graph: {some(sorted(unexpected))}",
            remedy=f"build it again: {command}",
        )
