"""A launch plan that ends before the head and returns its input, the hidden states, as logits."""

from __future__ import annotations

import numpy as np

from edge.errors import EngineError
from edge.launch import LOGITS, Launch, LaunchPlan, Pointer
from edge.runtime.engine import HIDDEN, HIDDEN_SCALE, ROUNDED_HIDDEN


def before_head(plan: LaunchPlan) -> tuple[LaunchPlan, float]:
    """Return the plan with its chains cut after the last norm, whose output is renamed to `logits`,
    and the scale of that output.

    Raises EngineError if the plan does not name the value.
    """
    name = HIDDEN if HIDDEN in plan.values else ROUNDED_HIDDEN
    if name not in plan.values or (name == ROUNDED_HIDDEN and HIDDEN_SCALE not in plan.inline):
        raise EngineError(
            "the launch plan does not name its last hidden states",
            remedy="export the model again with this version",
        )
    scale = 1.0
    if name == ROUNDED_HIDDEN:
        scale = float(np.frombuffer(bytes.fromhex(plan.inline[HIDDEN_SCALE].data), "<f4")[0])
    launches, programs = list(plan.launches), []
    for program in plan.programs:
        if program.kind == "settle":
            programs.append(program)
        elif program.kind == "chain":
            norm = next(i for i in program.launches if _writes(plan.launches[i], name))
            kept = program.launches[: program.launches.index(norm)]
            update = {"launches": (*kept, len(launches)), "picks": ()}
            programs.append(program.model_copy(update=update))
            launches.append(_renamed(plan.launches[norm], name))
    shortened = plan.model_copy(
        update={
            "launches": tuple(launches),
            "programs": tuple(programs),
            "values": plan.values | {LOGITS: plan.values[name]},
        }
    )
    return shortened, scale


def _writes(launch: Launch, name: str) -> bool:
    """Return whether a launch points to a value; the first one that does produces it."""
    return any(
        isinstance(a, Pointer) and (a.space, a.name) == ("value", name) for a in launch.arguments
    )


def _renamed(launch: Launch, name: str) -> Launch:
    arguments = tuple(
        a.model_copy(update={"name": LOGITS})
        if isinstance(a, Pointer) and (a.space, a.name) == ("value", name)
        else a
        for a in launch.arguments
    )
    return launch.model_copy(update={"arguments": arguments})
