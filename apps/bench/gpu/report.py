"""All measurements of one machine, as JSON and as the tables of docs/inside/measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from edge.apps.bench.gpu.measure import GpuTimes, KernelTime, ModelAgreement
from edge.apps.measure.table import FigureTable

SHOWN_MS = 0.1  # minimum time of a prompt's kernel to be shown


@dataclass
class GpuCase:
    """One model in one recipe. `times` is None if the result was wrong: it is not timed then."""

    model: str
    quant: str
    agreement: ModelAgreement
    weight_bytes: int = 0
    times: GpuTimes | None = None
    kernels: list[KernelTime] = field(default_factory=list)
    prompt_kernels: list[KernelTime] = field(default_factory=list)


@dataclass
class GpuReport:
    """All measurements of one machine.

    Attributes:
        machine: names and versions.
        copy: bytes per second of a copy, counting reads and writes.
        peers: milliseconds by model and peer, or the reason why a peer was not measured.
    """

    machine: dict[str, str]
    copy: float
    cases: list[GpuCase] = field(default_factory=list)
    peers: dict[str, dict[str, float | str]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return all(case.agreement.right for case in self.cases)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        parts = [_facts(self), _steps(self), _kernels(self), _prompts(self), _peers(self)]
        return "\n\n".join(part for part in parts if part) + "\n"


def _facts(report: GpuReport) -> str:
    lines = [f"- {name}: {value}" for name, value in report.machine.items()]
    lines.append(f"- copy inside the device: {report.copy / 1e9:.0f} GB/s, read and written")
    return "\n".join(lines)


def _steps(report: GpuReport) -> str:
    timed = [case for case in report.cases if case.times is not None]
    lengths = sorted({n for case in timed if case.times for n in case.times.ttft})
    drafts = sorted({k for case in timed if case.times for k in case.times.verify})
    head = ["model", "recipe", "result", "TPOT ms", "committed ms", "of roofline", "launches"]
    head += [f"TTFT {n} ms" for n in lengths] + [f"verify {k}" for k in drafts]
    head += ["state MB", "memory MB"]
    rows = []
    for case in report.cases:
        row = [case.model, case.quant, case.agreement.line()]
        if (t := case.times) is not None:
            bound = 1000 * case.weight_bytes / report.copy
            row += [f"{t.tpot:.3f}", f"{t.committed:.3f}", f"{bound / t.tpot:.2f}", str(t.launches)]
            row += [f"{t.ttft[n]:.1f}" for n in lengths]
            row += [f"{t.verify[k] / t.tpot:.2f}" for k in drafts]
            row += [f"{t.memory['state'] / 1e6:.1f}", f"{t.memory['total'] / 1e6:.0f}"]
        rows.append(row + [""] * (len(head) - len(row)))
    note = (
        "verify K: a run of K + 1 tokens, in steps; roofline: weights ÷ the copy's bytes a second"
    )
    return FigureTable(head, rows).markdown() + "\n\n" + note


def _kernels(report: GpuReport) -> str:
    rows = [
        [case.model, case.quant, kernel.kernel, str(kernel.launches), f"{kernel.ms:.3f}",
         f"{kernel.bytes_per_s / 1e9:.0f}", f"{kernel.bytes_per_s / report.copy:.2f}"]
        for case in report.cases
        for kernel in case.kernels
    ]  # fmt: skip
    head = ["model", "recipe", "kernel", "launches a step", "ms", "weights GB/s", "of the copy"]
    return FigureTable(head, rows).markdown() if rows else ""


def _prompts(report: GpuReport) -> str:
    rows = [
        [case.model, case.quant, kernel.kernel, str(kernel.launches), f"{kernel.ms:.2f}"]
        for case in report.cases
        for kernel in case.prompt_kernels
        if kernel.ms >= SHOWN_MS
    ]
    head = ["model", "recipe", "kernel", "launches a prompt of 1024", "ms"]
    return FigureTable(head, rows).markdown() if rows else ""


def _peers(report: GpuReport) -> str:
    rows = [
        [model, peer, f"{value:.3f} ms" if isinstance(value, float) else value]
        for model, peers in report.peers.items()
        for peer, value in peers.items()
    ]
    return FigureTable(["model", "peer", "result"], rows).markdown() if rows else ""
