"""Estimates of the memory that a bundle will take on the `cpu` engine, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from edge.bundle import Manifest
from edge.config import ModelConfig
from edge.launch import LaunchPlan, Log
from edge.runtime import memory
from edge.runtime.cuda.launching import PlanExecutor
from edge.runtime.cuda.runs import StateRuns
from edge.runtime.cuda.sliding import fitted, sliding
from edge.runtime.cuda.state import blocks
from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.layout import StateLayout
from edge.runtime.ledger import state_slots

# A process that has imported the runtime without ONNX Runtime and loaded nothing.
PROGRAM = 52_000_000
# The library, staging, and Python objects for a plan's launches. Measured as growth of resident
# memory, x86-64: 24 Mamba layers of 768 in fp32, w8, w4, w8a8 (0.97 to 1.02 times the estimate);
# the demonstrations (1 to 1.2).
_LIBRARY_BYTES, _LAUNCH_BYTES = memory.LEAST, 20_000
# Launches per layer, if there is no plan yet to count them: 11 to 16 for the demonstrations.
_LAUNCHES_PER_LAYER = 16


class _UnloadedExecutor(PlanExecutor):
    """An executor without kernels and weights, which only knows sizes."""

    def __init__(self, plan: LaunchPlan, weights_bytes: int) -> None:
        self.plan = plan
        self._weights_bytes = weights_bytes

    @property
    def weights_bytes(self) -> int:
        return self._weights_bytes


def any_tree(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with trees of any size: only GPUs have separate kernels for few rows."""
    programs = [
        program.model_copy(update={"max_rows": None}) if program.kind == "tree" else program
        for program in plan.programs
    ]
    return plan.model_copy(update={"programs": tuple(programs)})


def plan_bundle(
    manifest: Manifest,
    plan: LaunchPlan,
    *,
    batch: int = 1,
    window: int = DEFAULT_WINDOW,
    capacity: int | None = None,
    snapshots: int = 0,
    program: int = 0,
) -> dict[str, int]:
    """Return bytes by purpose, with the keys of `edge.runtime.memory.plan_bundle`."""
    plan = any_tree(sliding(plan))
    layout = StateLayout.of(
        manifest.model,
        batch=batch,
        capacity=capacity,
        dtypes=manifest.state_dtypes,
        logs=plan.logs,
    )
    chunk = manifest.limits.chunk
    weights = sum(entry.size for entry in manifest.files if entry.path.endswith(".bin"))
    runs = StateRuns(
        plan=plan,
        executor=_UnloadedExecutor(plan, weights),
        chunk=chunk,
        layout=fitted(layout, plan, window=window, chunk=chunk),
        window=window,
        width=manifest.model.vocab_size,
    )
    program += _LIBRARY_BYTES + _LAUNCH_BYTES * len(plan.launches)
    return memory.with_loading(runs.memory_plan(), program, weights, snapshots)


def plan_config(
    config: ModelConfig, weights: int, *, chunk: int, capacity: int, batch: int = 1,
    snapshots: int = 0, program: int = 0, dtypes: Mapping[str, str] | None = None,
) -> dict[str, int]:  # fmt: skip
    """Return the plan of a model that has not been exported, with the keys of `plan_bundle`.

    `weights`: bytes of the weights in files. States not in `dtypes` are planned in fp32; the values
    of a run and the number of launches are estimated.
    """
    logs = {
        f"layers.{index}.{name}": Log(dtype="f32", width=width)
        for index, layer in enumerate(config.layers)
        for name, width in layer.log_widths().items()
    }
    layout = StateLayout.of(config, batch=batch, capacity=capacity, dtypes=dtypes, logs=logs)
    window = DEFAULT_WINDOW
    layout = layout.sliding(window=window, chunk=chunk)
    out = memory.plan(config, layout, window=window, chunk=chunk, weights=weights, widens=False)
    ring = blocks(layout, window, state_slots(window))[0].nbytes
    out["total"] += ring - out["state_ring"]
    out["state_ring"] = ring
    program += _LIBRARY_BYTES + _LAUNCH_BYTES * _LAUNCHES_PER_LAYER * len(config.layers)
    return memory.with_loading(out, program, weights, snapshots)
