"""Check every peer, time those whose results are right, in turn, and report.

A round gives a median over a few calls, and the report gives the median over rounds. Ratios are
taken within each round, because a slow round slows both sides down. Each round measures memory too:
on a shared host its speed changes by a factor of two within minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edge.apps.bench.constrained import mask_table, masks
from edge.apps.bench.folder import ModelFolder
from edge.apps.bench.goals import GOALS, check_goals, over
from edge.apps.bench.models import SHAPES, model_named
from edge.apps.bench.peers import DRIVER, PEERS, RUN, Peer, Tokens, TransformersPeer, missing
from edge.apps.measure.agreement import Agreement, Logits, agreement
from edge.apps.measure.cpu_profile import breakdown
from edge.apps.measure.machine import OtherLoad, installed
from edge.apps.measure.roofline import Roof, measure_roof
from edge.apps.measure.run_cost import DECODE, PREFILL, RunKind, ranked
from edge.apps.measure.stopwatch import PAUSE, Say, in_turn, seconds, silent, without_collections
from edge.apps.measure.table import FigureTable, shares
from edge.apps.units import megabytes
from edge.errors import EngineError, InputError
from edge.tensors import parameters

Facts = dict[str, Any]
FIGURES = ("decode", "prefill", "run")
PROMPT, PREFILL_TOKENS, STEPS = 32, 256, 4
RUNS = 6  # runs to compare, because the agreement on four tokens is mostly chance
BUDGET = 1.0  # seconds after which a turn stops warming up, or stops sampling
WARM = {"decode": 3, "prefill": 1, "run": 2}
CALLS = {"decode": 24, "prefill": 3, "run": 8}
SHOWN = 8  # operators

# Maximum KL divergence from fp32, nats per token, that rounding of weights (and, below 16 bits, of
# activations to 8) explains. Random layers amplify rounding far more than trained ones, so these
# limits are wide: unrelated logits are 1 nat apart, lost scan states cost 0.5, of one layer 0.14.
# They are for LAYERS layers, and grow with more, as what rounding costs does.
LAYERS = 24
KL_LIMITS = {"fp32": 1e-5, "fp16": 1e-3, "w8": 0.06, "w4": 0.8, "w8a8": 0.12}

OURS = ("edge-w8a8-cpu", "edge-w8a8-cuda")  # denominator of ratios: the first that is timed
PACKAGES = ("mamba-edge", "onnxruntime", "numpy", "torch", "transformers", "llama-cpp-python")


def run(
    shape: str,
    names: Sequence[str],
    folder: Path,
    *,
    threads: int,
    rounds: int,
    profiled: bool = False,
    command: str = "",
    say: Say = silent,
) -> Facts:
    """Check every installed peer of `names`, time it if right, and return the `--json` object.

    `folder`: folder for the models. `profiled`: break down our time even if every goal is met.
    Raises InputError for an unknown peer or shape, EngineError if our runtime fails.
    """
    config = model_named(shape, SHAPES, "shape")
    workspace = ModelFolder(shape, folder)
    absent = {
        name: f"needs {', '.join(lacking)}: {PEERS[name].install}"
        for name in names
        if (lacking := missing(name))
    }
    reference = make_reference(workspace, threads, say)
    peers, results = _load_right_peers(names, absent, workspace, threads, reference, say)
    others = OtherLoad()
    roofs: list[Roof] = []
    prompt = reference.long[:PREFILL_TOKENS]
    found = timed(
        peers, prompt, rounds, say, lambda: roofs.append(measure_roof(threads, arithmetic=False))
    )
    for name, times in found.items():
        results[name] |= times
    head = others.facts()
    expected = [*check_goals(results, config, roofs)]
    typical = sorted(roofs, key=lambda roof: roof.bandwidth)[len(roofs) // 2] if roofs else None
    return head | {
        "command": command,
        "versions": {name: installed(name) for name in PACKAGES},
        "shape": {"name": shape, "parameters": parameters(config)},
        "threads": threads,
        "rounds": rounds,
        "prefill_tokens": PREFILL_TOKENS,
        "run_tokens": RUN,
        "roof": typical.to_dict() if typical else None,
        "roofs": [roof.to_dict() for roof in roofs],
        "peers": results,
        "absent": absent,
        "expected": expected,
        "masks": masks(),
        "costs": _break_down(workspace, threads, results, expected, profiled, say),
    }


def write_models(shape: str, names: Sequence[str], folder: Path) -> None:
    """Write the models of those peers that do not exist in the folder. It takes no GPU.

    Raises InputError for an unknown peer or shape, and for peers whose packages are missing.
    """
    model_named(shape, SHAPES, "shape")
    lacking = {name: [part for part in missing(name) if part != DRIVER] for name in names}
    if problems := [f"{name} needs {', '.join(parts)}" for name, parts in lacking.items() if parts]:
        installs = dict.fromkeys(PEERS[name].install for name, parts in lacking.items() if parts)
        raise InputError("; ".join(problems), field="peers", remedy="; ".join(installs))
    for name in names:
        PEERS[name].write(ModelFolder(shape, folder))


def _load_right_peers(
    names: Sequence[str],
    absent: dict[str, str],
    workspace: ModelFolder,
    threads: int,
    reference: Reference,
    say: Say,
) -> tuple[list[Peer], dict[str, Facts]]:
    """Return the peers whose results are right, still loaded, and the results of all.

    A foreign peer that does not run is added to `absent`.
    """
    peers: list[Peer] = []
    results: dict[str, Facts] = {}
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
        results[name] = _check_peer(peer, reference, len(workspace.config.layers))
        if results[name]["right"]:
            peers.append(peer)
        else:
            peer.close()
    return peers, results


def right(facts: Facts) -> bool:
    """Return whether all our results are right."""
    return all(peer["right"] for name, peer in facts["peers"].items() if name.startswith("edge-"))


# -- correctness ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Token ids of two sequences, and fp32 logits of each token."""

    short: Tokens
    short_logits: Logits
    long: Tokens
    long_logits: Logits


def make_reference(workspace: ModelFolder, threads: int, say: Say) -> Reference:
    """Compute fp32 logits of both sequences with transformers, in one pass each."""
    if lacking := missing("transformers"):
        raise InputError(
            f"the reference needs {', '.join(lacking)}", remedy=PEERS["transformers"].install
        )
    say(f"making {workspace.name} and its fp32 reference")
    model = TransformersPeer(workspace, threads)
    count, vocab = PREFILL_TOKENS + RUN + STEPS, workspace.config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, count, dtype=np.int64)
    short, long = tokens[: PROMPT + RUNS * RUN + STEPS], tokens
    return Reference(short, model.whole(short), long, model.whole(long))


def compare(peer: Peer, reference: Reference) -> dict[str, Agreement]:
    """Run the peer over the reference's tokens, in the ways it will be timed.

    These are a prompt, runs, steps, and steps after the long prompt.
    """
    split, end = PROMPT, PROMPT + RUNS * RUN
    short, expected = reference.short, reference.short_logits
    agreements = {
        "prompt": agreement(expected[:split], peer.prefill(short[:split], every_row=True).copy()),
    }
    runs = [peer.run(short[start : start + RUN]).copy() for start in range(split, end, RUN)]
    agreements["run"] = agreement(expected[split:end], np.concatenate(runs))
    steps = [peer.step(int(token)).copy() for token in short[end:]]
    agreements["steps"] = agreement(expected[end:], np.concatenate(steps))
    after = [peer.prefill(reference.long[:PREFILL_TOKENS]).copy()]
    after += [peer.step(int(token)).copy() for token in reference.long[PREFILL_TOKENS:]]
    agreements["prefill"] = agreement(reference.long_logits[-len(after) :], np.concatenate(after))
    return agreements


def _check_peer(peer: Peer, reference: Reference, layers: int) -> Facts:
    parts, limit = compare(peer, reference), KL_LIMITS[peer.rounding] * max(1, layers / LAYERS)
    return {
        "version": peer.version,
        "weight_bytes": peer.weight_bytes,
        "note": peer.note,
        "right": all(part.kl_nats <= limit for part in parts.values()),
        "kl_limit": limit,
        "agreement": {name: asdict(part) for name, part in parts.items()},
    }


# -- times ----------------------------------------------------------------------------------------


def timed(
    peers: Sequence[Peer],
    tokens: Tokens,
    rounds: int,
    say: Say,
    each_round: Callable[[], None] = lambda: None,
) -> dict[str, Facts]:
    """Time every figure of every peer, in milliseconds per call, by round.

    Prefill reads all of `tokens`. `each_round` is called after every round. Closes the peers.
    """
    samples: dict[str, dict[str, list[float]]] = {
        peer.name: {figure: [] for figure in FIGURES} for peer in peers
    }
    with without_collections():
        for number in range(rounds if peers else 0):
            say(f"round {number + 1} of {rounds}")
            for figure in FIGURES:
                for peer in in_turn(peers, number):
                    time.sleep(PAUSE)
                    samples[peer.name][figure].append(
                        1e3 * median(_time_turn(peer, figure, tokens))
                    )
            each_round()
    for peer in peers:
        peer.close()
    return {
        name: {
            figure: {"median_ms": median(values), "min_ms": min(values), "max_ms": max(values),
                     "rounds_ms": values}
            for figure, values in figures.items()
        }
        for name, figures in samples.items()
    }  # fmt: skip


def _time_turn(peer: Peer, figure: str, tokens: Tokens) -> list[float]:
    """Return seconds of each call of one turn, after warm-up calls."""
    call = _timed_call(peer, figure, tokens)
    _repeat(call, WARM[figure])
    return _repeat(call, CALLS[figure])


def _repeat(call: Callable[[], object], limit: int) -> list[float]:
    """Return seconds of each of 1 to `most` calls. None but the first begins after the budget."""
    durations: list[float] = []
    while len(durations) < limit and sum(durations) < BUDGET:
        durations.append(seconds(call))
    return durations


def _timed_call(peer: Peer, figure: str, tokens: Tokens) -> Callable[[], object]:
    """Return the function to time for a figure. Decode and run start from a non-empty state."""
    if figure == "prefill":
        return lambda: peer.prefill(tokens)
    run_tokens, token = tokens[:RUN], int(tokens[0])
    peer.prefill(run_tokens)
    return (lambda: peer.step(token)) if figure == "decode" else (lambda: peer.run(run_tokens))


def _break_down(
    workspace: ModelFolder,
    threads: int,
    results: Mapping[str, Facts],
    expected: Sequence[Facts],
    profiled: bool,
    say: Say,
) -> Facts:
    """Break down the time of our figures: those that missed a goal, or all if `profiled`."""
    kinds = {"decode": DECODE, "prefill": PREFILL, "run": RunKind(RUN, 10)}
    costs: Facts = {}
    for name in GOALS:
        missed = {row["figure"] for row in expected if row["peer"] == name and not row["met"]}
        if "decode" not in results.get(name, {}) or not (profiled or missed):
            continue
        # the cost of a short run is compared with that of a step
        figures = {*FIGURES} if profiled else missed | ({"decode"} if "run" in missed else set())
        say(f"profiling {name}")
        figure_kinds = {figure: kinds[figure] for figure in FIGURES if figure in figures}
        bundle = workspace.bundle(name.removeprefix("edge-").removesuffix("-cpu"))
        for figure, cost in breakdown(bundle, threads, figure_kinds).items():
            costs[f"{name} {figure}"] = cost.to_dict() | {"title": cost.title}
    return costs


# -- terminal -------------------------------------------------------------------------------------


def parts(facts: Facts) -> Iterator[FigureTable | str]:
    """Yield tables of results and ratios, then goals and breakdowns."""
    shape, others = facts["shape"], facts["used_by_others"]
    yield (
        f"Mamba {shape['name']}, {shape['parameters'] / 1e6:.3g} M random weights; "
        f"{facts['rounds']} rounds in turn"
    )
    cpu = facts["machine"]["cpu"]
    yield f"{facts['threads']} threads on {cpu}, {others:.0%} of it in use by others"
    if not facts["trustworthy"]:
        yield "the machine was busy with something else: do not trust the times and ratios"
    if facts["roofs"]:
        yield _bandwidth(facts["roofs"])
    yield _agreements(facts["peers"])
    timed_peers = {name: peer for name, peer in facts["peers"].items() if "decode" in peer}
    if timed_peers:
        yield times(timed_peers)
    if ours := next((name for name in OURS if name in timed_peers), None):
        yield _ratios(timed_peers, ours)
    yield mask_table(facts["masks"])
    for row in facts["expected"]:
        mark = "unsure" if not facts["trustworthy"] else "met" if row["met"] else "MISSED"
        yield f"{mark:<7} {row['expected']}: {row['value']:.2f}"
    for name, reason in facts["absent"].items():
        yield f"absent  {name}: {reason}"
    for name, peer in facts["peers"].items():
        if peer["note"]:
            yield f"note    {name}: {peer['note']}"
    for cost in facts["costs"].values():
        yield f"{cost['title']}: {cost['total_ms']:.2f} ms while profiled"
        spent = {f"{op} ({entry['count']}×)": entry["ms"] for op, entry in cost["ops"].items()}
        rows = [*ranked(spent, SHOWN), ("between kernels", cost["between_ms"])]
        yield from shares(rows, cost["total_ms"])


def _bandwidth(roofs: Sequence[Facts]) -> str:
    speeds = [max(roof["read_bytes_per_s"], roof["copy_bytes_per_s"]) / 1e9 for roof in roofs]
    least, most = min(speeds), max(speeds)
    return f"memory moves {median(speeds):.1f} GB/s, {least:.1f} to {most:.1f} by round"


def _agreements(peers: Mapping[str, Facts]) -> FigureTable:
    rows = []
    for name, peer in peers.items():
        parts = peer["agreement"].values()
        rows.append((
            name, megabytes(peer["weight_bytes"]), f"{max(a['kl_nats'] for a in parts):.2g}",
            f"{peer['kl_limit']:g}", f"{min(a['top1'] for a in parts):.0%}",
            f"{max(a['max_difference'] for a in parts):.2g}", "right" if peer["right"] else "WRONG",
        ))  # fmt: skip
    head = ("peer", "weights", "KL nats/token", "at most", "top-1", "max |Δ|", "")
    return FigureTable(head, rows, title="against transformers fp32, the worst of four parts")


def times(peers: Mapping[str, Facts]) -> FigureTable:
    rows = [
        (name, f"{peer['decode']['median_ms']:.2f}",
         f"{peer['decode']['min_ms']:.2f}–{peer['decode']['max_ms']:.2f}",
         f"{1e3 * PREFILL_TOKENS / peer['prefill']['median_ms']:.0f}",
         f"{peer['run']['median_ms']:.2f}")
        for name, peer in peers.items()
    ]  # fmt: skip
    head = ("peer", "step, ms", "min–max", f"prefill {PREFILL_TOKENS}, t/s", f"run of {RUN}, ms")
    return FigureTable(head, rows, title="medians")


def _ratios(peers: Mapping[str, Facts], name: str) -> FigureTable:
    """Return ratios of times to those of peer `name`, slower above 1, medians over rounds."""
    ours, title = peers[name], f"time ÷ that of {name}"
    rows = []
    for name, peer in peers.items():
        ratios = [over(peer[figure], ours[figure]) for figure in FIGURES]
        ratios.append(over(peer["run"], peer["decode"]))
        rows.append((name, *(f"{ratio:.2f}" for ratio in ratios)))
    return FigureTable(("peer", *FIGURES, "run ÷ its step"), rows, title=title)
