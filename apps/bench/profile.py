"""Where the time of a step, a prefill and a short run goes, from ONNX Runtime's own profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.apps.bench.check import PREFILL
from edge.apps.bench.measure import Figure
from edge.apps.bench.peers import RUN
from edge.bundle import Manifest, open_bundle
from edge.config import Mamba1Config
from edge.runtime import ort_session
from edge.runtime.layout import StateLayout

REPEATS = {"decode": 20, "prefill": 3, "run": 10}
TOKENS = {"decode": 1, "prefill": PREFILL, "run": RUN}
SHOWN = 8


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one call.

    Attributes:
        total: from entering ONNX Runtime to leaving it.
        ops: operator → its own time without that of its subgraph's operators, and how often.
    """

    title: str
    total: float
    ops: dict[str, tuple[float, int]]

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
        return {"total_ms": self.total, "between_ms": self.between, "ops": ops}


def profile(bundle: Path, threads: int, figures: Iterable[Figure]) -> dict[str, Cost]:
    """Run a bundle's graph under the profiler, with the options the engine loads it with."""
    return {figure: _profile_one(bundle, threads, figure) for figure in figures}


def _profile_one(bundle: Path, threads: int, figure: Figure) -> Cost:
    with open_bundle(bundle) as opened, tempfile.TemporaryDirectory() as folder:
        options = ort_session.session_options(threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        manifest = opened.manifest
        graph = manifest.graphs["ort"]
        session = ort_session.load(opened.read(graph), bundle / graph, options)
        # a longer prompt is run in chunks, of which this is one
        count = min(TOKENS[figure], manifest.limits.chunk)
        feeds = _feeds(session, manifest, count, every_row=figure == "run")
        outputs = [meta.name for meta in session.get_outputs()]
        for _ in range(REPEATS[figure] + 1):
            session.run(outputs, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    title = f"{manifest.quantization.recipe} {figure}, one run of {count}"
    return summarise(title, events, REPEATS[figure])


def summarise(title: str, events: list[dict[str, Any]], repeats: int) -> Cost:
    """Costs of one call: of the last `repeats` the quickest, which was disturbed least."""
    runs = sorted((e for e in events if e["name"] == "model_run"), key=lambda e: e["ts"])[-repeats:]
    chosen = min(runs, key=lambda e: e["dur"])
    nodes = [
        e
        for e in events
        if e.get("cat") == "Node"
        and e["name"].endswith("_kernel_time")
        and chosen["ts"] <= e["ts"] < _end(chosen)
    ]
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for event, own in _own_times(nodes):
        name = event["args"]["op_name"]
        spent[name] += own
        counts[name] += 1
    ops = {name: (spent[name] / 1e3, counts[name]) for name in spent}
    return Cost(title, chosen["dur"] / 1e3, ops)


def _own_times(nodes: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Each event with its duration less that of the events inside it (Scan and If have bodies)."""
    open_events: list[tuple[dict[str, Any], list[float]]] = []
    for event in sorted(nodes, key=lambda e: (e["ts"], -e["dur"])):
        while open_events and event["ts"] >= _end(open_events[-1][0]):
            closed, inside = open_events.pop()
            yield closed, closed["dur"] - sum(inside)
        if open_events:
            open_events[-1][1].append(event["dur"])
        open_events.append((event, []))
    for closed, inside in open_events:
        yield closed, closed["dur"] - sum(inside)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _feeds(
    session: Any, manifest: Manifest, count: int, *, every_row: bool
) -> dict[str, NDArray[Any]]:
    """Inputs of a chain of `count` tokens from a zero state, those the graph has."""
    config, order = manifest.model, np.arange(count, dtype=np.int64)
    layout = StateLayout.of(config, dtypes=manifest.state_dtypes)
    taps = max(layer.d_conv for layer in config.layers if isinstance(layer, Mamba1Config)) - 1
    feeds: dict[str, NDArray[Any]] = {
        "tokens": (order % config.vocab_size)[:, None],
        "rows": order if every_row else order[-1:],
        "kept": order[-1:] if count > RUN else order,
        "previous": order[:, None] - 1 - np.arange(taps),
        "parents": order - 1,
        "tree": np.array(False),
    }
    for name, shape in layout.recurrent.items():
        feeds[name] = np.zeros(shape, layout.dtype(name))
    return {meta.name: feeds[meta.name] for meta in session.get_inputs()}
