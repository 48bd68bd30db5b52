"""A launch plan for KV caches that slide: layers with a window keep the last positions alone.

Such a cache holds positions FIRST, FIRST+1, … in slots 0, 1, …, and is moved along by the state
(`State.make_room`). Keys were rotated before they were stored, and a token's window counts back
from its own slot: so a kernel that is told of a past FIRST tokens shorter, and of fewer slots, does
the same arithmetic in the same order. No kernel knows of it.
"""

from __future__ import annotations

from edge.launch import Argument, Launch, LaunchPlan, Pointer, Size
from edge.runtime.layout import StateLayout

# The input `run` with the past that is in caches that slide, and the symbol of their slots.
RUN, SLOTS = "run.sliding", "W"


def sliding(plan: LaunchPlan) -> LaunchPlan:
    """The plan with such caches for every layer with a window; the plan itself where none has."""
    windowed = {
        argument.name
        for launch in plan.launches
        if plan.variants[launch.variant].constants.get("WINDOW")
        for argument in launch.arguments
        if isinstance(argument, Pointer) and argument.space == "cache"
    }
    if not windowed or RUN in plan.inputs:
        return plan
    launches = tuple(_sliding(launch, windowed) for launch in plan.launches)
    inputs = plan.inputs | {RUN: plan.inputs["run"]}
    return plan.model_copy(update={"launches": launches, "inputs": inputs})


def _sliding(launch: Launch, windowed: set[str]) -> Launch:
    named = {a.name for a in launch.arguments if isinstance(a, Pointer) and a.space == "cache"}
    if named.isdisjoint(windowed):
        return launch
    arguments = tuple(map(_told, launch.arguments))
    return launch.model_copy(update={"arguments": arguments})


def _told(argument: Argument) -> Argument:
    if isinstance(argument, Pointer) and argument.space == "input" and argument.name == "run":
        return argument.model_copy(update={"name": RUN})
    if isinstance(argument, Size) and argument.of == "C":
        # not checked: no plan in a file has this symbol
        return argument.model_copy(update={"of": SLOTS})
    return argument


def fitted(layout: StateLayout, plan: LaunchPlan, *, window: int, chunk: int) -> StateLayout:
    """The layout that a plan's kernels are told of: with caches that slide if the plan has such."""
    return layout.sliding(window=window, chunk=chunk) if RUN in plan.inputs else layout
