"""The memory plan as `edge info` shows it: whether a bundle fits a machine, and what to lower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from edge.apps.info.boards import MemoryBudget
from edge.apps.units import megabytes
from edge.bundle import Manifest
from edge.config import ModelConfig
from edge.launch import LaunchPlan
from edge.runtime.engine import check_capacity
from edge.tensors import parameters

# bits, and bytes of the file per weight: 129 M parameters take 141 MB in w8 and 106 MB in w4
_SMALLER = {"w8": (8, 1.1), "w4": (4, 0.82)}
_PARTS = {
    "weights": "as loaded, estimated",
    "state_ring": "states of the last 8 tokens, which can be rewound",
    "kv_cache": "KV caches",
    "snapshots": "",
    "workspace": "values of one run, estimated",
    "logits": "of the tokens that can be rewound",
    "program": "interpreter and libraries",
}


CONTEXT = 2048  # tokens of context that are planned for, if the model was trained for as many


def sized_context(config: ModelConfig, context: int | None) -> int:
    """Return the tokens of context to plan for. Raises InputError if no state can hold so many."""
    if context is None:
        return min(CONTEXT, config.max_context or CONTEXT)
    check_capacity(config, context)
    return context


@dataclass(frozen=True)
class PlanSizes:
    """Sizes to plan for: tokens of the KV cache, sequences, copies of the state.

    Attributes:
        launches: launch plan of the `cpu` engine; None for `ort`.
    """

    context: int
    batch: int
    snapshots: int
    launches: LaunchPlan | None = None

    def plan(self, manifest: Manifest) -> dict[str, int]:
        """Return the bytes of a whole process by purpose (`edge.runtime.memory.plan_bundle`)."""
        from edge.runtime import memory
        from edge.runtime.cpu import planning

        sizes = {"batch": self.batch, "capacity": self.context, "snapshots": self.snapshots}
        if self.launches is None:
            return memory.plan_bundle(manifest, **sizes, program=memory.PROGRAM)
        return planning.plan_bundle(manifest, self.launches, **sizes, program=planning.PROGRAM)


def this_machine() -> MemoryBudget:
    from edge.runtime.memory import available_bytes

    return MemoryBudget("this machine", available_bytes(), "free now, within control groups")


def facts(manifest: Manifest, sizes: PlanSizes, place: MemoryBudget) -> dict[str, Any]:
    """Return the plan for `--json`: sizes, `plan` in bytes, `fits` (None if unknown), `lower`."""
    plan = sizes.plan(manifest)
    fits = None if place.available is None else plan["total"] <= place.available
    return {
        "place": place.name,
        "available_bytes": place.available,
        "available_basis": place.basis,
        "context": sizes.context,
        "batch": sizes.batch,
        "snapshots": sizes.snapshots,
        "engine": "ort" if sizes.launches is None else "cpu",
        "plan": plan,
        "fits": fits,
        "lower": lower(manifest, sizes, place.available or 0) if fits is False else [],
    }


def lower(manifest: Manifest, sizes: PlanSizes, available: int) -> list[str]:
    """Return each option that, lowered alone, makes the model fit; else the smallest total."""

    def fits(changed: PlanSizes) -> bool:
        return changed.plan(manifest)["total"] <= available

    options = []
    if manifest.model.has_attention and (
        largest := greatest(sizes.context - 1, 1, lambda n: fits(replace(sizes, context=n)))
    ):
        options.append(f"--context {largest}")
    largest = greatest(sizes.snapshots - 1, 0, lambda n: fits(replace(sizes, snapshots=n)))
    if largest is not None:
        options.append(f"--snapshots {largest}")
    if largest := greatest(sizes.batch - 1, 1, lambda n: fits(replace(sizes, batch=n))):
        options.append(f"--batch {largest}")
    for recipe, (bits, _) in _SMALLER.items():
        if bits < manifest.quantization.bits:
            total = sizes.plan(rounded(manifest, recipe))["total"]
            if total <= available:
                options.append(f"--quant {recipe} when exporting: about {megabytes(total)}")
    if not options:
        minimum = PlanSizes(1, 1, 0, sizes.launches)
        candidates = [manifest, *(rounded(manifest, recipe) for recipe in _SMALLER)]
        total = min(minimum.plan(candidate)["total"] for candidate in candidates)
        outcome = ", which fits" if total <= available else ": use a smaller model"
        options.append(
            "several at once: with 4-bit weights, one sequence, one token of context and no "
            f"snapshots it takes about {megabytes(total)}{outcome}"
        )
    return options


def rounded(manifest: Manifest, recipe: str) -> Manifest:
    """Return the manifest that exporting with `recipe` would give, with estimated file sizes."""
    bits, bytes_per_weight = _SMALLER[recipe]
    weights = manifest.files[0].model_copy(
        update={"path": "weights.bin", "size": int(bytes_per_weight * parameters(manifest.model))}
    )
    quantization = manifest.quantization.model_copy(update={"recipe": recipe, "bits": bits})
    return manifest.model_copy(update={"quantization": quantization, "files": (weights,)})


def greatest(high: int, low: int, good: Callable[[int], bool]) -> int | None:
    """Return the largest good number in low … high, or None; all below a good one must be good."""
    if high < low or not good(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def lines(facts: dict[str, Any]) -> list[str]:
    """Format the plan as aligned lines."""
    plan, free = facts["plan"], facts["available_bytes"]
    notes = _PARTS | {
        "kv_cache": f"{facts['context']} tokens, batch {facts['batch']}",
        "snapshots": f"{facts['snapshots']} of {megabytes(plan['snapshot'])}",
    }
    shown = [part for part in notes if plan[part]]
    out = [f"  memory on {facts['place']}, engine {facts['engine']}"]
    out += [f"    {megabytes(plan[p]):>9}  {p.replace('_', ' '):<11}{notes[p]}" for p in shown]
    out.append(f"    {megabytes(plan['total']):>9}  total")
    if plan["total"] == plan["loading"]:
        out[-1] += "      while loading, which takes more than running"
    if free is None:
        return [*out, "  the system does not say how much is free"]
    verdict = "fits" if facts["fits"] else "does not fit"
    out.append(f"  {verdict} in {megabytes(free)} ({facts['available_basis']})")
    return out + [f"    lower: {option}" for option in facts["lower"]]
