"""The launch plan as `edge info --launches` shows it: what each kind of run launches on a GPU."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from edge.apps.units import megabytes
from edge.bundle import Bundle
from edge.bundle.kernels import open_plan
from edge.config import ModelConfig
from edge.launch import ITEM_SIZE, Launch, LaunchPlan, Pointer, Program, Sizes

# tokens that can be rewound; the logs have twice as many slots
_WINDOW = 8
_LAYER = re.compile(r"layers\.(\d+)\.")


def facts(bundle: Bundle, context: int) -> dict[str, Any]:
    """Return `collect` of a bundle. Raises BundleError when it has no launch plan."""
    manifest = bundle.manifest
    return collect(open_plan(bundle), manifest.model, chunk=manifest.limits.chunk, context=context)


def collect(plan: LaunchPlan, config: ModelConfig, *, chunk: int, context: int) -> dict[str, Any]:
    """Return the facts for `--json`: `programs`, and `variants`, the number of their kernels.

    Each program has `run`, `tokens` (the run it is counted for), `launches`, `layer` (launches per
    layer by kind, the maximum where they differ), `kernels` (name → launches), `weight_bytes` read
    (without embedding tables) and `arena_bytes` of values.
    """
    from edge.runtime.cuda.runs import place

    rows = []
    for program in plan.programs:
        tokens = 0 if program.kind == "settle" else program.max_rows or chunk
        logit_rows = tokens if program.kind == "tree" else min(1, tokens)
        sizes: Sizes = {"T": tokens, "B": 1, "L": logit_rows, "C": context, "S": 2 * _WINDOW}
        launches = [plan.launches[index] for index in program.launches]
        rows.append(
            {
                "run": _run_label(program),
                "tokens": tokens,
                "launches": len(launches),
                "layer": _launches_per_layer(launches, config),
                "kernels": dict(
                    sorted(Counter(_kernel(plan, launch) for launch in launches).items())
                ),
                "weight_bytes": _weight_bytes(plan, launches),
                "arena_bytes": place(program, plan, sizes).total,
            }
        )
    return {"variants": len(plan.variants), "programs": rows}


def _run_label(program: Program) -> str:
    if program.kind == "settle":
        return "settle"
    return program.kind if program.max_rows is None else f"{program.kind} <= {program.max_rows}"


def _kernel(plan: LaunchPlan, launch: Launch) -> str:
    return plan.variants[launch.variant].kernel


def _weight_bytes(plan: LaunchPlan, launches: list[Launch]) -> int:
    """Return the bytes of the weights that the launches read whole."""
    names = {
        argument.name
        for launch in launches
        if not _kernel(plan, launch).startswith("embed.")
        for argument in launch.arguments
        if isinstance(argument, Pointer) and argument.space == "weight"
    }
    weights = (plan.weights[name] for name in sorted(names))
    return sum(weight.elements * ITEM_SIZE[weight.dtype] for weight in weights)


def _launches_per_layer(launches: list[Launch], config: ModelConfig) -> dict[str, int]:
    count = Counter(map(layer_of, launches))
    maximum: dict[str, int] = {}
    for index, layer in enumerate(config.layers):
        maximum[layer.kind] = max(maximum.get(layer.kind, 0), count[index])
    return maximum


def layer_of(launch: Launch) -> int | None:
    """Return the layer whose weights or states a launch reads; without any, that of its values."""
    pointers = [argument for argument in launch.arguments if isinstance(argument, Pointer)]
    fixed = [p for p in pointers if p.space not in ("value", "input")]
    matches = [_LAYER.match(pointer.name) for pointer in fixed or pointers]
    return max((int(match[1]) for match in matches if match), default=None)


def lines(facts: dict[str, Any]) -> list[str]:
    """Format the programs as a table, then the kernels of a step."""
    out = [f"  launches of {facts['variants']} kernels"]
    out.append(
        f"    {'run':<12}{'tokens':>7}{'launches':>10}{'weights':>10}{'values':>10}  a layer"
    )
    for row in facts["programs"]:
        layer = ", ".join(f"{kind} {count}" for kind, count in row["layer"].items())
        out.append(
            f"    {row['run']:<12}{row['tokens']:>7}{row['launches']:>10}"
            f"{megabytes(row['weight_bytes']):>10}{megabytes(row['arena_bytes']):>10}  {layer}"
        )
    step = facts["programs"][0]
    out.append(f"  kernels of {step['run']}")
    return out + [f"    {count:>6}  {name}" for name, count in step["kernels"].items()]
