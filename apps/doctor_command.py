"""`edge doctor`: what this machine can run, by running it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

import edge
from edge.apps.doctor_checks import MODEL, ORDER, Finding, examine

_SHOWN = {"ok": "OK", "absent": "absent", "broken": "BROKEN"}


def doctor(
    bundle: Annotated[
        str, typer.Argument(help="Bundle to try the engines with, or a demonstration's name.")
    ] = MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tell what works here, what is absent, and what is broken and how to mend it.

    Everything is tried, not looked up: a step on the CPU and on the GPU, a copy, a kernel compiled.
    Nothing is installed or set. Takes some ten seconds. Exits with 0 whatever is found.
    """
    findings = []
    for name in ORDER:
        finding = examine(name, bundle)
        findings.append(finding)
        if not as_json:
            print(line(finding), flush=True)
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"version": edge.__version__, "checks": checks}, indent=1))


def line(finding: Finding) -> str:
    """A finding, and under it what to do."""
    text = f"{_SHOWN[finding.status]:<7} {finding.name:<12} {finding.detail}"
    return text if finding.remedy is None else f"{text}\n{'':<21}→ {finding.remedy}"
