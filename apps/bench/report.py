"""What was measured, for people and as one JSON object."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from edge.apps.bench.check import PREFILL, Verdict
from edge.apps.bench.measure import FIGURES, Figure, Timing, Timings
from edge.apps.bench.peers import RUN, Peer, installed
from edge.apps.bench.shapes import Shape
from edge.apps.measure.machine import BUSY, machine
from edge.apps.measure.ort_profile import RunCost, ranked
from edge.apps.measure.table import shares
from edge.apps.units import megabytes

THEIRS = "llama-q8_0"
SHOWN = 8  # operators
OURS = "edge-w8"  # what ratios are given to


@dataclass(frozen=True)
class Goal:
    """What is expected of a recipe: decode and prefill against THEIRS, a short run in steps."""

    decode: float
    prefill: float
    run: float


GOALS = {OURS: Goal(1.5, 2.0, 1.5), "edge-w8a8": Goal(1.8, 3.0, 1.3)}
PACKAGES = ("mamba-edge", "onnxruntime", "numpy", "torch", "transformers", "llama-cpp-python")


@dataclass(frozen=True)
class PeerResult:
    """What there is to say of a peer besides its times."""

    name: str
    version: str
    weight_bytes: int
    note: str
    verdict: Verdict

    @staticmethod
    def of(peer: Peer, verdict: Verdict) -> PeerResult:
        return PeerResult(peer.name, peer.version, peer.weight_bytes, peer.note, verdict)

    @property
    def ours(self) -> bool:
        return self.name.startswith("edge-")


@dataclass(frozen=True)
class Expectation:
    """A ratio that is expected of one of our peers, and what was measured."""

    peer: str
    figure: Figure
    text: str
    value: float
    met: bool

    def to_dict(self) -> dict[str, object]:
        return {
            "peer": self.peer,
            "figure": self.figure,
            "expected": self.text,
            "value": self.value,
            "met": self.met,
        }


@dataclass
class Report:
    """`absent`: peer → why it did not take part. `costs`: peer and figure → where the time goes.
    `others`: share of the processor that other programs used beside us.
    """

    shape: Shape
    threads: int
    rounds: int
    command: str
    results: Sequence[PeerResult]
    timings: Timings
    absent: Mapping[str, str]
    costs: dict[str, RunCost] = field(default_factory=dict)
    others: float = 0.0

    @property
    def busy(self) -> bool:
        """Whether other programs wanted the processor too."""
        return self.others > BUSY

    @property
    def right(self) -> bool:
        """No wrong result of ours."""
        return all(result.verdict.right for result in self.results if result.ours)

    @property
    def expectations(self) -> list[Expectation]:
        """What is expected of our recipes, as far as it was measured."""
        return [
            expectation
            for name, goal in GOALS.items()
            if name in self.timings
            for expectation in _expected(name, goal, self.timings)
        ]

    def missed(self, peer: str) -> list[Figure]:
        return [e.figure for e in self.expectations if e.peer == peer and not e.met]

    def to_dict(self) -> dict[str, object]:
        """The JSON object."""
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": self.command,
            "machine": machine(),
            "used_by_others": self.others,
            "trustworthy": not self.busy,
            "versions": {name: installed(name) for name in PACKAGES},
            "shape": {"name": self.shape.name, "parameters": self.shape.parameters},
            "threads": self.threads,
            "rounds": self.rounds,
            "prefill_tokens": PREFILL,
            "run_tokens": RUN,
            "peers": {result.name: self._peer(result) for result in self.results},
            "absent": dict(self.absent),
            "expected": [expected.to_dict() for expected in self.expectations],
            "costs": {name: cost.to_dict() for name, cost in self.costs.items()},
        }

    def _peer(self, result: PeerResult) -> dict[str, object]:
        verdict = result.verdict
        timing = self.timings.get(result.name, {})
        return {
            "version": result.version,
            "weight_bytes": result.weight_bytes,
            "note": result.note,
            "right": verdict.right,
            "kl_limit": verdict.limit,
            "agreement": {name: part.to_dict() for name, part in verdict.parts.items()},
            **{figure: timing[figure].to_dict() for figure in timing},
        }

    # -- for people ------------------------------------------------------------------------------

    def show(self, console: Console) -> None:
        """Tables of results and ratios, then what was expected and where the time goes."""
        for line in self._heading():
            console.print(line, soft_wrap=True, highlight=False)
        console.print(self._agreement_table())
        if self.timings:
            console.print(self._times_table())
        if OURS in self.timings:
            console.print(self._ratio_table(self.timings[OURS]))
        for line in self._lines():
            console.print(line, soft_wrap=True, highlight=False)

    def _heading(self) -> Iterable[str]:
        box = machine()
        size = f"{self.shape.parameters / 1e6:.3g} M random weights"
        yield f"Mamba {self.shape.name}, {size}; {self.rounds} rounds in turn"
        yield f"{self.threads} threads on {box['cpu']}, {self.others:.0%} of it in use by others"
        if self.busy:
            yield "the machine was busy with something else: do not trust the times and ratios"

    def _agreement_table(self) -> Table:
        table = _table("against transformers fp32, the worst of four parts", "peer", "weights")
        for title in ("KL nats/token", "at most", "top-1", "max |Δ|", ""):
            table.add_column(title, justify="right")
        for result in self.results:
            worst = result.verdict.worst
            table.add_row(
                result.name, megabytes(result.weight_bytes), f"{worst.kl:.2g}",
                f"{result.verdict.limit:g}", f"{worst.top1:.0%}", f"{worst.worst:.2g}",
                "right" if result.verdict.right else "WRONG",
            )  # fmt: skip
        return table

    def _times_table(self) -> Table:
        table = _table("medians", "peer")
        for title in ("step, ms", "min–max", f"prefill {PREFILL}, tokens/s", f"run of {RUN}, ms"):
            table.add_column(title, justify="right")
        for name, times in self.timings.items():
            low, high = times["decode"].spread
            table.add_row(
                name, f"{times['decode'].median:.2f}", f"{low:.2f}–{high:.2f}",
                f"{1e3 * PREFILL / times['prefill'].median:.0f}", f"{times['run'].median:.2f}",
            )  # fmt: skip
        return table

    def _ratio_table(self, ours: Mapping[Figure, Timing]) -> Table:
        """Above 1: slower than OURS. Ratios are of one round each, so not those of the medians."""
        table = _table(f"time ÷ that of {OURS}", "peer")
        for title in (*FIGURES, "run ÷ its step"):
            table.add_column(title, justify="right")
        for name, times in self.timings.items():
            ratios = [times[figure].over(ours[figure]) for figure in FIGURES]
            ratios.append(times["run"].over(times["decode"]))
            table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios))
        return table

    def _lines(self) -> Iterable[str]:
        for expected in self.expectations:
            mark = "unsure" if self.busy else "met" if expected.met else "MISSED"
            yield f"{mark:<7} {expected.text}: {expected.value:.2f}"
        for name, reason in self.absent.items():
            yield f"absent  {name}: {reason}"
        for result in self.results:
            if result.note:
                yield f"note    {result.name}: {result.note}"
        for cost in self.costs.values():
            yield f"{cost.title}: {cost.total:.2f} ms while profiled"
            spent = {f"{op} ({count}×)": ms for op, (ms, count) in cost.ops.items()}
            rows = [*ranked(spent, SHOWN), ("between operators", cost.between)]
            yield from shares(rows, cost.total)


def _expected(name: str, goal: Goal, timings: Timings) -> Iterable[Expectation]:
    ours, theirs = timings[name], timings.get(THEIRS)
    if theirs:
        decode = theirs["decode"].over(ours["decode"])
        prefill = theirs["prefill"].over(ours["prefill"])
        text = f"{name} decode ≥ {goal.decode:g} × {THEIRS}"
        yield Expectation(name, "decode", text, decode, decode >= goal.decode)
        text = f"{name} prefill ≥ {goal.prefill:g} × {THEIRS}"
        yield Expectation(name, "prefill", text, prefill, prefill >= goal.prefill)
    run = ours["run"].over(ours["decode"])
    text = f"{name} {RUN}-token run ≤ {goal.run:g} × a step"
    yield Expectation(name, "run", text, run, run <= goal.run)


def _table(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table
