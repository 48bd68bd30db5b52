"""Results as JSON, to resume from, and as Markdown, to attach to an issue."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from edge.apps.measure.table import FigureTable
from edge.replace import replace

SCHEMA = 1
_TAIL = 2000  # characters of a step's output in the report
Status = Literal["ok", "wrong", "not run"]


@dataclass(frozen=True)
class Result:
    """The result of one step.

    Attributes:
        reason: why the step is not ok; "" if it is.
        figures: JSON object that the output ends with, or {}.
        before, after: `board.now` at the step's beginning and end.
    """

    name: str
    claim: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    tail: str = ""
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)


@dataclass
class BoardReport:
    """The results of a verification.

    Attributes:
        began: date and time, with the time zone.
        facts: `board.facts` at the beginning.
    """

    bundle: str
    began: str
    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)

    def put(self, result: Result) -> None:
        """Add a result, or replace an earlier one of the same step."""
        names = [earlier.name for earlier in self.results]
        if result.name in names:
            self.results[names.index(result.name)] = result
        else:
            self.results.append(result)

    def status(self, name: str) -> Status | None:
        return next((result.status for result in self.results if result.name == name), None)

    def save(self, folder: Path) -> None:
        """Write report.json and report.md, each whole or not at all."""
        data = {"schema": SCHEMA, **asdict(self)}
        for name, text in (("json", json.dumps(data, indent=1) + "\n"), ("md", markdown(self))):
            replace(folder / f"report.{name}", [text.encode()], mode=0o666)


def load(folder: Path, bundle: str, facts: dict[str, Any]) -> BoardReport | None:
    """Return the folder's report if it is of this bundle, machine and version, else None."""
    try:
        data = json.loads((folder / "report.json").read_text())
        results = [Result(**entry) for entry in data["results"]]
        report = BoardReport(data["bundle"], data["began"], data["facts"], results)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    matches = data.get("schema") == SCHEMA and report.bundle == bundle
    return report if matches and _identity(report.facts) == _identity(facts) else None


def _identity(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that results depend on: all except the moment's."""
    return {name: value for name, value in facts.items() if name != "now"}


# -- Markdown -------------------------------------------------------------------------------------

_FIGURES = (
    "kl", "top1", "equal_answers", "seconds", "bytes", "ttft_ms", "tpot_ms",
    "prefill_tokens_per_s", "decode_tokens_per_s", "peak_memory_bytes", "tokens", "grown_bytes",
    "available_fell_bytes",
)  # fmt: skip
_LABELS = {"ok": "ok", "wrong": "**WRONG**", "not run": "not run"}


def markdown(report: BoardReport) -> str:
    """Return the whole report."""
    return "\n".join([*_head(report), *_table(report), *_details(report), ""])


def _head(report: BoardReport) -> list[str]:
    facts = report.facts
    machine, now = facts["machine"], facts["now"]
    rows = {
        "began": report.began,
        "board": machine["board"] or "not a Jetson",
        "processor": f"{machine['cpu']}, {machine['usable_cpus']} usable",
        "system": f"{machine['system']}, Python {machine['python']}",
        **facts["found"],
        "packages": ", ".join(f"{name} {v}" for name, v in facts["packages"].items()),
        "edge": f"{facts['edge']}, commit {facts['commit'] or 'unknown'}",
        "memory": f"{_mb(now['mem_available_bytes'])} of {_mb(machine['memory_bytes'])} available",
        "bundle": report.bundle,
    }
    cells = [(name, _cell(value or "unknown")) for name, value in rows.items()]
    return ["# edge on this machine", "", FigureTable(("", ""), cells).markdown()]


def _table(report: BoardReport) -> list[str]:
    rows = []
    for result in report.results:
        outcome = _LABELS[result.status] + (f": {result.reason}" if result.reason else "")
        hottest = max(result.after.get("temperature_c", {}).values(), default=None)
        cells = (
            result.name,
            outcome,
            result.claim,
            figures(result.figures),
            f"{result.seconds:.0f}",
            result.after.get("power_mode"),
            hottest,
            _mb(result.after.get("mem_available_bytes")),
        )
        rows.append([_cell("" if cell is None else cell) for cell in cells])
    head = ("step", "result", "what it proves", "figures", "s", "mode", "°C", "available")
    return ["", FigureTable(head, rows).markdown()]


def figures(found: dict[str, Any]) -> str:
    """Return the figures of a step that the table shows; the JSON has all."""
    shown = {name: found[name] for name in _FIGURES if isinstance(found.get(name), int | float)}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items())


def _details(report: BoardReport) -> list[str]:
    lines: list[str] = []
    for result in report.results:
        if result.tail:
            lines += ["", f"## {result.name}", "", "```", result.tail.replace("```", "'''"), "```"]
    return lines


def tail(text: str) -> str:
    """Return the end of a step's output, from the beginning of a line if it has several."""
    text = text.strip()
    if len(text) <= _TAIL:
        return text
    end = text[-_TAIL:]
    return "… " + (end.partition("\n")[2] or end)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _mb(value: object) -> str:
    return f"{value / 1e6:,.0f} MB" if isinstance(value, int | float) else "unknown"
