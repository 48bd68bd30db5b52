"""What the bench of drafting found, as tables and as a JSON object."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from edge.apps.bench.simulated import Simulated
from edge.apps.measure.machine import BUSY, machine
from edge.apps.profile.drafts import NONE, Drafted, DraftSide

_LEGEND = (
    "length  tokens that a verifying run yields",
    "×  tokens/s against none, all prompts together; calc: by the papers' formula",
    "p50, p10  × of prompts: what half of them reach, and what all but the slowest tenth",
    "own  of the time, what passes in no model's run",
)
_SIMULATED = (
    "verify  a verifying run in steps; calc: by the formula at the α found, at α: the one wanted",
    "same  tokens that are plain decoding's; fewer than there are: runs have other bits than steps",
)


@dataclass(frozen=True)
class Row:
    """One way of drafting on one set of prompts.

    Attributes:
        tokens_per_s: the median over rounds.
        speedup: tokens/s against no drafting, of all prompts together within each round, then the
            median over rounds.
        median_prompt, slowest_tenth: quantiles over prompts of the same, each prompt's a median
            over rounds: what half of them reach, and nine of ten.
        theoretical: by the papers' formula, from acceptance and costs.
        overhead_share: of the time, in no model's run.
    """

    prompts: str
    count: int
    temperature: float
    way: str
    tokens_per_s: float
    acceptance_length: float | None = None
    speedup: float | None = None
    median_prompt: float | None = None
    slowest_tenth: float | None = None
    theoretical: float | None = None
    overhead_share: float | None = None


def rows_of(
    name: str, temperature: float, plain: DraftSide, drafted: Mapping[str, Drafted]
) -> Iterator[Row]:
    """No drafting first, then every way of it."""
    count = len(plain.rounds[0])
    yield Row(name, count, temperature, NONE, median(plain.rates()))
    for way, found in drafted.items():
        yield Row(
            name, count, temperature, way, median(found.drafted.rates()),
            found.speculation.acceptance_length, found.speedup, found.median_prompt,
            found.slowest_tenth, found.theoretical, found.drafted.overhead_share,
        )  # fmt: skip


@dataclass
class Report:
    """Everything; `absent` are sets of prompts, `others` is the share of the CPU others used."""

    target: str
    draft: str
    threads: int
    rounds: int
    tokens: int
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    simulated: Sequence[Simulated] = ()
    shape: str = ""
    others: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "used_by_others": self.others,
            "trustworthy": self.others <= BUSY,
            "target": self.target,
            "draft": self.draft,
            "threads": self.threads,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "rows": [asdict(row) for row in self.rows],
            "absent": self.absent,
            "simulated_shape": self.shape,
            "simulated": [found.to_dict() for found in self.simulated],
        }

    def show(self, console: Console) -> None:
        """Tables, then what they lack."""
        console.print(
            f"{self.target} with {self.draft}: answers of at most {self.tokens} tokens, "
            f"{self.rounds} rounds; {self.threads or 'default'} threads on {machine()['cpu']}, "
            f"{self.others:.0%} of it in use by others",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        if self.others > BUSY:
            console.print("the machine was busy with something else: do not trust the times")
        console.print(self._table())
        for line in _LEGEND:
            console.print(line, soft_wrap=True, highlight=False)
        for name, reason in self.absent.items():
            console.print(f"absent  {name}: {reason}", soft_wrap=True, highlight=False)
        if self.simulated:
            console.print(self._simulation())
            for line in _SIMULATED:
                console.print(line, soft_wrap=True, highlight=False)

    def _table(self) -> Table:
        table = Table(box=box.MARKDOWN)
        table.add_column("prompts", no_wrap=True)
        for title in ("T", "drafts", "length", "t/s", "×", "p50", "p10", "calc", "own"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                f"{row.count} {row.prompts}", f"{row.temperature:g}", row.way,
                _two(row.acceptance_length), f"{row.tokens_per_s:.0f}", _two(row.speedup),
                _two(row.median_prompt), _two(row.slowest_tenth), _two(row.theoretical),
                "" if row.overhead_share is None else f"{row.overhead_share:.0%}",
            )  # fmt: skip
        return table

    def _simulation(self) -> Table:
        first = self.simulated[0]
        table = Table(
            box=box.MARKDOWN,
            title=f"{self.shape}, {first.tokens} tokens, simulated drafts of α {first.acceptance}",
        )
        table.add_column("recipe", no_wrap=True)
        for title in ("K", "length", "α", "verify", "×", "calc", "reached", "at α", "same"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.simulated:
            table.add_row(
                row.recipe, str(row.depth), _two(row.acceptance_length), _two(row.found),
                _two(row.verify), _two(row.speedup), _two(row.expected), f"{row.reached:.0%}",
                _two(row.promised), str(row.same),
            )  # fmt: skip
        return table


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
