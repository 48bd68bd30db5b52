"""ONNX Runtime's profile: what one run cost, by operator, by op of the model and by layer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.apps.profiling.optimized import Place, in_order
from edge.errors import EngineError

Event = dict[str, Any]
SHOWN = 8
_RUN, _KERNEL = "model_run", "_kernel_time"


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one run.

    Attributes:
        total: from entering ONNX Runtime to leaving it.
        ops: ONNX operator → its own time without that of its subgraph's operators, and how often.
        parts: op of the model → its time; empty where nodes could not be told.
        layers: `layer N`, `embedding`, `head` or `once` (for all layers together) → its time.
    """

    title: str
    total: float
    ops: dict[str, tuple[float, int]]
    parts: dict[str, float] = field(default_factory=dict)
    layers: dict[str, float] = field(default_factory=dict)

    @property
    def between(self) -> float:
        """What passes between operators: the executor, and the profiler's own events."""
        return self.total - sum(spent for spent, _ in self.ops.values())

    def lines(self) -> Iterator[str]:
        """The most expensive operators, one a line."""
        yield f"{self.title}: {self.total:.2f} ms while profiled"
        ranked = sorted(self.ops.items(), key=lambda item: -item[1][0])
        rest = sum(spent for _, (spent, _) in ranked[SHOWN:])
        for name, (spent, count) in ranked[:SHOWN]:
            yield f"  {spent:9.3f} ms {spent / self.total:5.0%}  {name} ({count}×)"
        yield f"  {rest:9.3f} ms {rest / self.total:5.0%}  other operators"
        yield f"  {self.between:9.3f} ms {self.between / self.total:5.0%}  between operators"

    def to_dict(self) -> dict[str, object]:
        ops = {name: {"ms": spent, "count": count} for name, (spent, count) in self.ops.items()}
        return {
            "total_ms": self.total,
            "between_ms": self.between,
            "ops": ops,
            "parts_ms": self.parts,
            "layers_ms": self.layers,
        }


def read_events(path: Path) -> list[Event]:
    """The runs and nodes of a profile, with no more of each than `summarise` asks for.

    Line by line, as ONNX Runtime writes it: whole, a prefill of 24 layers of Mamba is 70 MB of
    text and ten times that in memory. Raises EngineError where it is something else.
    """
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                text = line.strip().rstrip(",")
                if text in ("", "[", "]"):
                    continue
                event = json.loads(text)
                if event["name"] == _RUN or event["name"].endswith(_KERNEL):
                    operator = event["args"].get("op_name", "")
                    kept = {key: event[key] for key in ("name", "cat", "ts", "dur")}
                    found.append(kept | {"args": {"op_name": operator}})
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise EngineError(f"the profile cannot be read: {problem}", file=path) from None
    if not any(event["name"] == _RUN for event in found):
        raise EngineError("the profile holds no run", file=path)
    return found


def summarise(
    title: str, events: Sequence[Event], repeats: int, places: Sequence[Place] = ()
) -> Cost:
    """Costs of one run: of the last `repeats` the quickest, which was disturbed least.

    `places`: where each node of the optimized graph belongs, in the order they run in.
    """
    runs = sorted((e for e in events if e["name"] == _RUN), key=lambda e: e["ts"])[-repeats:]
    chosen = min(runs, key=lambda e: e["dur"])
    nodes = [
        e
        for e in events
        if e.get("cat") == "Node"
        and e["name"].endswith(_KERNEL)
        and chosen["ts"] <= e["ts"] < _end(chosen)
    ]
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event, own in _own_times(nodes):
        name = event["args"]["op_name"]
        spent[name] += own
        counts[name] += 1
    ops = {name: (spent[name] / 1e3, counts[name]) for name in spent}
    parts, layers = _by_place(list(_outermost(nodes)), places)
    return Cost(title, chosen["dur"] / 1e3, ops, parts, layers)


def _by_place(
    nodes: Sequence[Event], places: Sequence[Place]
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by op of the model and by layer; nothing where graph and events disagree."""
    ran = [event["args"]["op_name"] for event in nodes]
    if ran != [place.operator for place in places]:
        return {}, {}
    parts: dict[str, float] = defaultdict(float)
    layers: dict[str, float] = defaultdict(float)
    for event, place in zip(nodes, places, strict=True):
        parts[place.part] += event["dur"] / 1e3
        layers[place.layer] += event["dur"] / 1e3
    return dict(parts), {name: layers[name] for name in sorted(layers, key=in_order)}


def _outermost(nodes: Iterable[Event]) -> Iterator[Event]:
    """The nodes that run in no other node's body (Scan and If have some), in order."""
    end = float("-inf")
    for event in sorted(nodes, key=lambda e: (e["ts"], -e["dur"])):
        # a body's node can share its owner's first microsecond, but is never the first of both
        if event["ts"] >= end:
            yield event
            end = _end(event)


def _own_times(nodes: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event with its duration less that of the events inside it."""
    open_events: list[tuple[Event, list[float]]] = []
    for event in sorted(nodes, key=lambda e: (e["ts"], -e["dur"])):
        while open_events and event["ts"] >= _end(open_events[-1][0]):
            closed, inside = open_events.pop()
            yield closed, closed["dur"] - sum(inside)
        if open_events:
            open_events[-1][1].append(event["dur"])
        open_events.append((event, []))
    for closed, inside in open_events:
        yield closed, closed["dur"] - sum(inside)


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
