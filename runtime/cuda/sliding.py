"""Launch plans for sliding KV caches: layers with an attention window keep only recent positions.

A sliding cache holds positions FIRST, FIRST+1, … in slots 0, 1, …; the state moves them
(`State.make_room`). Keys are stored rotated, and a token's window counts back from its own slot.
So a kernel that gets a PAST smaller by FIRST, and fewer slots, does the same arithmetic in the same
order. Kernels need no changes.
"""

from __future__ import annotations

from edge.launch import Argument, Launch, LaunchPlan, Pointer, Size
from edge.runtime.layout import StateLayout

# The variant of the input `run` with PAST reduced by FIRST, and the symbol for the number of slots.
RUN, SLOTS = "run.sliding", "W"


def sliding(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with sliding caches for all layers with a window; unchanged without any."""
    windowed = {
        argument.name
        for launch in plan.launches
        if plan.variants[launch.variant].constants.get("WINDOW")
        for argument in launch.arguments
        if isinstance(argument, Pointer) and argument.space == "cache"
    }
    if not windowed or RUN in plan.inputs:
        return plan
    launches = tuple(_sliding_launch(launch, windowed) for launch in plan.launches)
    inputs = plan.inputs | {RUN: plan.inputs["run"]}
    return plan.model_copy(update={"launches": launches, "inputs": inputs})


def _sliding_launch(launch: Launch, windowed: set[str]) -> Launch:
    caches = {a.name for a in launch.arguments if isinstance(a, Pointer) and a.space == "cache"}
    if caches.isdisjoint(windowed):
        return launch
    arguments = tuple(map(_sliding_argument, launch.arguments))
    return launch.model_copy(update={"arguments": arguments})


def _sliding_argument(argument: Argument) -> Argument:
    if isinstance(argument, Pointer) and argument.space == "input" and argument.name == "run":
        return argument.model_copy(update={"name": RUN})
    if isinstance(argument, Size) and argument.of == "C":
        # model_copy does not validate: no plan in a file may use this symbol
        return argument.model_copy(update={"of": SLOTS})
    return argument


def fitted(layout: StateLayout, plan: LaunchPlan, *, window: int, chunk: int) -> StateLayout:
    """Return the layout for a plan's kernels: with sliding caches if the plan uses them."""
    return layout.sliding(window=window, chunk=chunk) if RUN in plan.inputs else layout
