"""A launch plan that ends before the head, with what the head would read in place of logits."""

from __future__ import annotations

import numpy as np

from edge.errors import EngineError
from edge.launch import LOGITS, Launch, LaunchPlan, Pointer
from edge.runtime.engine import HIDDEN, HIDDEN_SCALE, ROUNDED_HIDDEN


def before_head(plan: LaunchPlan) -> tuple[LaunchPlan, float]:
    """The plan's chains up to the last norm, whose output is called `logits` in them, and what a
    unit of it is.

    Raises EngineError: the plan has no such value.
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
    changed = plan.model_copy(
        update={
            "launches": tuple(launches),
            "programs": tuple(programs),
            "values": plan.values | {LOGITS: plan.values[name]},
        }
    )
    return changed, scale


def _writes(launch: Launch, name: str) -> bool:
    """Whether it points to a value: the first launch that does is the one that makes it."""
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
