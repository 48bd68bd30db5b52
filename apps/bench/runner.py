"""One measurement from the random weights to the report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from edge.apps.bench import check
from edge.apps.bench.check import Reference
from edge.apps.bench.measure import FIGURES, PAUSE, Timings, measure
from edge.apps.bench.peers import PEERS, RUN, Peer, Workspace, missing
from edge.apps.bench.report import GOALS, PeerResult, Report
from edge.apps.bench.shapes import Shape
from edge.errors import EngineError, InputError

OBSERVED = 0.5  # seconds in which to see what others are doing
Say = Callable[[str], None]


def run(
    shape: Shape,
    names: Sequence[str],
    folder: Path,
    *,
    threads: int,
    rounds: int,
    profiled: bool = False,
    command: str = "",
    say: Say = lambda text: None,
) -> Report:
    """Check every installed peer of `names`, time those whose results are right, in turn.

    `folder` takes the models; `profiled` looks for our costs even when no figure is missed.
    """
    workspace = Workspace(shape, folder)
    absent = {name: _install(name) for name in names if missing(name)}
    reference = make_reference(workspace, threads, say)
    peers, results = [], []
    for name in dict.fromkeys(names):
        if name in absent:
            continue
        say(f"checking {name}")
        try:
            peer = PEERS[name].make(workspace, threads)
        except EngineError as problem:
            if name.startswith("edge-"):
                raise
            absent[name] = str(problem)
            continue
        result = PeerResult.of(peer, check.verdict(peer, reference))
        results.append(result)
        if result.verdict.right:
            peers.append(peer)
        else:
            peer.close()
    others = _used_by_others()
    timings = _timed(peers, reference, rounds, say)
    report = Report(shape, threads, rounds, command, results, timings, absent)
    report.others = max(others, _used_by_others())
    for name in GOALS:
        if name in timings and (profiled or report.missed(name)):
            _explain(report, name, workspace, profiled, say)
    return report


def make_reference(workspace: Workspace, threads: int, say: Say) -> Reference:
    """fp32 logits of both token sequences, by transformers in one pass."""
    if lacking := missing("transformers"):
        raise InputError(
            f"the reference needs {', '.join(lacking)}", remedy=PEERS["transformers"].install
        )
    from edge.apps.bench.peer_transformers import TransformersPeer

    say(f"making {workspace.shape.name} and its fp32 reference")
    model = TransformersPeer(workspace, threads)
    tokens = check.token_ids(workspace.shape.vocab_size)
    short, long = tokens[: check.PROMPT + RUN + check.STEPS], tokens[: check.PREFILL + 1]
    return Reference(short, model.whole(short), long, model.whole(long))


def _used_by_others() -> float:
    """Share of the processor in use while we do nothing."""
    time.sleep(PAUSE)
    return float(psutil.cpu_percent(OBSERVED)) / 100


def _timed(peers: Sequence[Peer], reference: Reference, rounds: int, say: Say) -> Timings:
    gc.collect()
    gc.disable()  # a collection within a call would be charged to it
    try:
        return measure(peers, reference.long[: check.PREFILL], rounds, say)
    finally:
        gc.enable()
        for peer in peers:
            peer.close()


def _explain(report: Report, name: str, workspace: Workspace, every: bool, say: Say) -> None:
    from edge.apps.bench.peer_edge import bundle_path
    from edge.apps.measure.ort_profile import DECODE, PREFILL, RunKind, breakdown

    # what a short run costs is seen beside a step
    wanted = set(FIGURES) if every else {*report.missed(name)}
    if "run" in wanted:
        wanted.add("decode")
    say(f"profiling {name}")
    kinds = {"decode": DECODE, "prefill": PREFILL, "run": RunKind(RUN, 10)}
    figures: dict[str, RunKind] = {figure: kinds[figure] for figure in FIGURES if figure in wanted}
    costs = breakdown(bundle_path(workspace, name), report.threads, figures)
    report.costs |= {f"{name} {figure}": cost for figure, cost in costs.items()}


def _install(name: str) -> str:
    lacking = ", ".join(missing(name))
    return f"needs {lacking}: {PEERS[name].install}"
