"""Break down the time of a run by operator, op and layer, with ONNX Runtime's profiler.

ONNX Runtime inlines the functions of a bundle's graph. Only the names of values between nodes still
show them: `layers.3.scan` is the result of a call, `_inlfunc_SelectiveScan_token_7_u` lies inside
one. The profile's events are therefore matched with the nodes of the optimized graph.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.apps.measure.run_cost import HEAD, RunCost, RunKind, along, runs
from edge.bundle import open_bundle
from edge.errors import EngineError
from edge.plugins.catalogue import OPS
from edge.protobuf import fields, message

Event = dict[str, Any]
_RUN, _KERNEL = "model_run", "_kernel_time"
_LAYER = re.compile(r"layers\.(\d+)\.")
_INLINED = "_inlfunc_"
# field numbers of onnx.proto: ModelProto.graph, GraphProto.node, and fields of NodeProto
_GRAPH, _NODE, _INPUT, _OUTPUT, _OPERATOR = 7, 1, 1, 2, 4
# rank of a node along the model: work for all layers, the embedding, layer N at N + 1, the head
_ONCE, _EMBEDDING, _HEAD = -1, 0, HEAD


def breakdown(
    bundle: Path, threads: int | None, kinds: Mapping[str, RunKind], *, spin: bool = False
) -> dict[str, RunCost]:
    """Profile each kind of run on the engine that a session uses.

    Of a prefill longer than a chunk, one chunk is run. Raises BundleError, EngineError.
    """
    return {name: _profile(bundle, threads, name, kind, spin) for name, kind in kinds.items()}


def _profile(bundle: Path, threads: int | None, name: str, kind: RunKind, spin: bool) -> RunCost:
    # imported here because other engines are measured without ONNX Runtime
    from edge.runtime.ort import OrtEngine
    from edge.runtime.ort_session import OPTIMIZED_GRAPH

    with open_bundle(bundle) as opened, tempfile.TemporaryDirectory() as folder:
        engine = OrtEngine.from_bundle(
            opened, threads=threads, spin=spin, profile=Path(folder), provider="cpu"
        )
        *_, count = runs(engine, kind)
        events = read_events(engine.end_profile())
        graph = Path(folder) / OPTIMIZED_GRAPH
        try:
            places = node_places(read_nodes(graph.read_bytes()))
        except (OSError, ValueError) as problem:
            raise EngineError(
                f"the optimized graph cannot be read: {problem}", file=graph
            ) from None
        recipe = opened.manifest.quantization.recipe
        return summarise(f"{recipe} {name}, one run of {count}", events, kind.repeats, places)


# -- the optimized graph --------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphNode:
    """One node: its operator, and the names of its inputs and outputs."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class NodePlace:
    """The op and layer that a node belongs to.

    Attributes:
        part: the op of the model, or the ONNX operator if it is not part of an op.
        layer: `layer N`, `embedding`, `head`, or `once` for work for all layers together.
    """

    operator: str
    part: str
    layer: str


def read_nodes(model: bytes) -> list[GraphNode]:
    """Read the nodes of a model file's main graph, in order. Raises ValueError if malformed."""
    graph = b"".join(message(value) for number, _, value in fields(model) if number == _GRAPH)
    return [_node(message(value)) for number, _, value in fields(graph) if number == _NODE]


def _node(data: bytes) -> GraphNode:
    values: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _OPERATOR: [""]}
    for number, _, value in fields(data):
        if number in values:
            values[number].append(message(value).decode())
    return GraphNode(values[_OPERATOR][-1], tuple(values[_INPUT]), tuple(values[_OUTPUT]))


def node_places(nodes: Sequence[GraphNode]) -> list[NodePlace]:
    """Return the op and layer of each node. `nodes` are in topological order.

    A node whose outputs carry the name of a layer belongs to that layer. Values inside a function
    do not carry one, so such a node belongs to the last layer among its inputs.
    """
    ranks: dict[str, int] = {}
    places = []
    for node in nodes:
        rank = max(map(_rank, node.outputs), default=_ONCE)
        if rank == _ONCE:
            input_ranks = (max(_rank(name), ranks.get(name, _ONCE)) for name in node.inputs)
            rank = max(input_ranks, default=_ONCE)
        ranks |= dict.fromkeys(node.outputs, rank)
        part = _function_op(node.outputs) or _function_op(node.inputs) or node.operator
        layer_names = {_ONCE: "once", _EMBEDDING: "embedding", _HEAD: "head"}
        places.append(NodePlace(node.operator, part, layer_names.get(rank, f"layer {rank - 1}")))
    return places


def _rank(name: str) -> int:
    """Return the rank of a value along the model by its name, _ONCE if the name has none."""
    if layer := _LAYER.match(name):
        return 1 + int(layer[1])
    if name.startswith(("norm_f", "lm_head", "logits")):
        return _HEAD
    return _EMBEDDING if name.startswith("embed") else _ONCE


def _function_op(names: Iterable[str]) -> str | None:
    """Return the op whose function contains one of these values, by the longest matching name."""
    for name in names:
        if name.startswith(_INLINED):
            suffix = name.removeprefix(_INLINED)
            matches = [op for op in OPS if suffix == op or suffix.startswith(f"{op}_")]
            if matches:
                return max(matches, key=len)
    return None


# -- the profile ----------------------------------------------------------------------------------


def read_events(path: Path) -> list[Event]:
    """Read the runs and nodes of a profile, with only the fields that `summarise` needs.

    The file is read line by line, because the profile of a prefill of 24 Mamba layers is 70 MB of
    text and ten times that in memory. Raises EngineError for a malformed file.
    """
    events = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                text = line.strip().rstrip(",")
                if text in ("", "[", "]"):
                    continue
                event = json.loads(text)
                if event["name"] == _RUN or event["name"].endswith(_KERNEL):
                    operator = event["args"].get("op_name", "")
                    timing = {key: event[key] for key in ("name", "cat", "ts", "dur")}
                    events.append(timing | {"args": {"op_name": operator}})
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise EngineError(f"the profile cannot be read: {problem}", file=path) from None
    if not any(event["name"] == _RUN for event in events):
        raise EngineError("the profile holds no run", file=path)
    return events


def summarise(
    title: str, events: Sequence[Event], repeats: int, places: Sequence[NodePlace] = ()
) -> RunCost:
    """Return the cost of the fastest of the last `repeats` runs, the least disturbed one.

    `places`: op and layer of each node of the optimized graph, in execution order.
    """
    runs = sorted((e for e in events if e["name"] == _RUN), key=lambda e: e["ts"])[-repeats:]
    fastest = min(runs, key=lambda e: e["dur"])
    nodes = [
        e
        for e in events
        if e.get("cat") == "Node"
        and e["name"].endswith(_KERNEL)
        and fastest["ts"] <= e["ts"] < _end(fastest)
    ]
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    outermost = []
    for event, own, nested in _own_times(nodes):
        name = event["args"]["op_name"]
        spent[name] += own
        counts[name] += 1
        if not nested:
            outermost.append(event)
    ops = {name: (spent[name] / 1e3, counts[name]) for name in spent}
    parts, layers = _by_place(outermost, places)
    return RunCost(title, fastest["dur"] / 1e3, ops, parts, layers)


def _by_place(
    nodes: Sequence[Event], places: Sequence[NodePlace]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds by op and by layer, empty if events do not match the graph."""
    ordered = sorted(nodes, key=lambda e: e["ts"])
    if [event["args"]["op_name"] for event in ordered] != [place.operator for place in places]:
        return {}, {}
    parts: dict[str, float] = defaultdict(float)
    layers: dict[str, float] = defaultdict(float)
    for event, place in zip(ordered, places, strict=True):
        parts[place.part] += event["dur"] / 1e3
        layers[place.layer] += event["dur"] / 1e3
    return dict(parts), {name: layers[name] for name in sorted(layers, key=along)}


def _own_times(nodes: Iterable[Event]) -> Iterator[tuple[Event, float, bool]]:
    """Yield each event, its duration less that of nested events, and whether it is nested itself.

    Events nest in the body of a Scan or an If.
    """
    open_events: list[tuple[Event, list[float]]] = []

    def close() -> tuple[Event, float, bool]:
        event, nested = open_events.pop()
        return event, event["dur"] - sum(nested), bool(open_events)

    for event in sorted(nodes, key=lambda e: (e["ts"], -e["dur"])):
        while open_events and event["ts"] >= _end(open_events[-1][0]):
            yield close()
        if open_events:
            open_events[-1][1].append(event["dur"])
        open_events.append((event, []))
    while open_events:
        yield close()


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])
