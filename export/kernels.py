"""A bundle's launch plan, and its kernels for the architectures that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge.bundle import BundleWriter
from edge.bundle.kernels import PLAN, PLAN_FILE, index_file
from edge.export.planning import Progress
from edge.launch import LaunchPlan
from edge.plugins.compiler.aot import compile_variants, triton_version
from edge.plugins.lowering.plan import LoweringError, lower


@dataclass(frozen=True)
class Added:
    """What was written: `graphs` and `kernels` go into the manifest.

    Attributes:
        unplanned: why there is no plan, or None.
    """

    graphs: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    unplanned: str | None = None


def check_can_compile(architectures: Sequence[int]) -> None:
    """Raises ExportError, before any work is done, where kernels are wanted and Triton is not."""
    if architectures:
        triton_version()


def add_plan(writer: BundleWriter, graph: str, architectures: Sequence[int]) -> LaunchPlan | str:
    """Lower the written graph to `graphs/cuda.json`; without one, why there is none.

    Raises ExportError, where kernels are wanted, when no plan can be made.
    """
    try:
        plan = lower((writer.folder / graph).read_bytes(), writer.folder)
    except LoweringError as problem:
        if architectures:
            raise
        return str(problem)
    writer.path(PLAN_FILE).write_bytes(plan.to_json())
    return plan


def add_kernels(
    writer: BundleWriter,
    plan: LaunchPlan | str,
    architectures: Sequence[int],
    report: Progress,
    share: tuple[float, float],
) -> Added:
    """Compile the plan's kernels into `kernels/sm_XX/`, from `share[0]` of the export to `[1]`.

    Raises ExportError: a kernel cannot be compiled.
    """
    if isinstance(plan, str):
        return Added(unplanned=plan)

    def progress(done: int, total: int) -> None:
        left = 1 - done / max(1, total)
        report(f"kernels {done}/{total}", share[1] - (share[1] - share[0]) * left)

    graphs, kernels = {PLAN: PLAN_FILE}, {}
    if not architectures:
        return Added(graphs)
    for sm, made in compile_variants(plan.variants, architectures, progress).items():
        index = writer.path(index_file(sm))
        index.write_bytes(made.index.to_json())
        for name, cubin in made.cubins.items():
            index.with_name(name).write_bytes(cubin)
        kernels[f"sm_{sm}"] = index_file(sm)
    return Added(graphs, kernels)
