"""Goals of our recipes on the `cpu` engine, compared with measured times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any

from edge.apps.bench.peers import RUN
from edge.apps.measure.roofline import Roof, bound_s, work
from edge.config import ModelConfig
from edge.tensors import recurrent_state_shapes

Facts = dict[str, Any]
STATE_ITEM = 4  # bytes of a value of a state


@dataclass(frozen=True)
class Goal:
    """Goals of one of our peers.

    Attributes:
        peer: peer that it is compared with.
        decode, prefill: minimum ratio of that peer's time to ours.
        limit: maximum ratio of a step to the time that reading its bytes takes.
        run: maximum ratio of a short run to a step.
    """

    peer: str
    decode: float
    prefill: float = 5.0
    limit: float = 1.15
    run: float = 1.15


GOALS: Mapping[str, Goal] = {
    "edge-w8a8-cpu": Goal("llama-q8_0", decode=1.3),
    "edge-w8-cpu": Goal("llama-q8_0", decode=1.3),
    "edge-w4-cpu": Goal("llama-q4_0", decode=1.6, limit=1.3),
}


def over(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the ratio of times, the median over rounds."""
    pairs = zip(one["rounds_ms"], other["rounds_ms"], strict=True)
    return float(median(a / b for a, b in pairs))


def limit_ms(config: ModelConfig, weight_bytes: int, roof: Roof) -> float:
    """Return the milliseconds of reading a step's weights, and reading and writing its state."""
    states = recurrent_state_shapes(config).values()
    nbytes = sum(STATE_ITEM * prod(shape) for shape in states)
    return 1e3 * bound_s(work(config, weight_bytes, nbytes, 1), roof)


def check_goals(
    results: Mapping[str, Facts], config: ModelConfig, roofs: Sequence[Roof]
) -> Iterator[Facts]:
    """Yield the goals with measured values, as far as they were measured.

    `roofs`: the machine's limits in each round.
    """
    for name, goal in GOALS.items():
        ours, theirs = results.get(name, {}), results.get(goal.peer, {})
        if "decode" not in ours:
            continue
        if "decode" in theirs:
            for figure, least in (("decode", goal.decode), ("prefill", goal.prefill)):
                value = over(theirs[figure], ours[figure])
                yield _row(name, figure, f"≥ {least:g} × {goal.peer}", value, value >= least)
        limits = [limit_ms(config, ours["weight_bytes"], roof) for roof in roofs]
        value = over(ours["decode"], {"rounds_ms": limits})
        text = f"≤ {goal.limit:g} × reading its bytes"
        yield _row(name, "decode", text, value, value <= goal.limit)
        value = over(ours["run"], ours["decode"])
        text = f"{RUN}-token run ≤ {goal.run:g} × a step"
        yield _row(name, "run", text, value, value <= goal.run)


def _row(peer: str, figure: str, text: str, value: float, met: bool) -> Facts:
    subject = peer if figure == "run" else f"{peer} {figure}"
    return {"peer": peer, "figure": figure, "expected": f"{subject} {text}",
            "value": value, "met": met}  # fmt: skip
