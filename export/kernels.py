"""Write a bundle's launch plan, device graph, and kernels for the requested architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from edge.bundle import BundleWriter
from edge.bundle.kernels import DEVICE_GRAPH, DEVICE_GRAPH_FILE, PLAN, PLAN_FILE, index_file
from edge.export.calibration.prepare import Progress
from edge.launch import LaunchPlan
from edge.plugins.compiler.aot import compile_variants, triton_version
from edge.plugins.lowering.plan import LoweringError, plan_of, walked
from edge.plugins.tensorrt.graph import device_graph


@dataclass(frozen=True)
class Added:
    """Files that were added to a bundle; `graphs` and `kernels` go into the manifest.

    Attributes:
        plan: launch plan, or None.
        unplanned: reason why there is no plan, or None.
        unbuildable: reason why there is a plan but no graph for TensorRT, or None.
    """

    plan: LaunchPlan | None = None
    graphs: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    unplanned: str | None = None
    unbuildable: str | None = None


def check_can_compile(architectures: Sequence[int]) -> None:
    """Raise ExportError before any work is done if kernels are requested and Triton is missing."""
    if architectures:
        triton_version()


def add_plan(writer: BundleWriter, graph: str, architectures: Sequence[int]) -> Added:
    """Lower the written graph to `graphs/cuda.json` and `graphs/tensorrt.onnx` where possible.

    Raises ExportError when kernels are requested and the graph cannot be lowered to a plan.
    """
    model = (writer.folder / graph).read_bytes()
    try:
        lowered = walked(model, writer.folder)
        plan = plan_of(lowered)
    except LoweringError as problem:
        if architectures:
            raise
        return Added(unplanned=str(problem))
    writer.path(PLAN_FILE).write_bytes(plan.to_json())
    graphs = {PLAN: PLAN_FILE}
    try:
        tensorrt_graph = device_graph(model, lowered)
    except LoweringError as problem:
        return Added(plan, graphs, unbuildable=str(problem))
    writer.path(DEVICE_GRAPH_FILE).write_bytes(tensorrt_graph.SerializeToString(deterministic=True))
    return Added(plan, graphs | {DEVICE_GRAPH: DEVICE_GRAPH_FILE})


def add_kernels(
    writer: BundleWriter,
    added: Added,
    architectures: Sequence[int],
    report: Progress,
    share: tuple[float, float],
) -> Added:
    """Compile the plan's kernels into `kernels/sm_XX/`; progress runs from share[0] to share[1].

    Raises ExportError when a kernel cannot be compiled.
    """
    if added.plan is None or not architectures:
        return added

    def progress(done: int, total: int) -> None:
        remaining = 1 - done / max(1, total)
        report(f"kernels {done}/{total}", share[1] - (share[1] - share[0]) * remaining)

    kernels = {}
    compiled = compile_variants(added.plan.variants, architectures, progress, precompiled=False)
    for sm, result in compiled.items():
        index = writer.path(index_file(sm))
        index.write_bytes(result.index.to_json())
        for name, cubin in result.cubins.items():
            index.with_name(name).write_bytes(cubin)
        kernels[f"sm_{sm}"] = index_file(sm)
    return replace(added, kernels=kernels)
