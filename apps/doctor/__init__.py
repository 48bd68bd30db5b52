"""`edge doctor`: find out what this machine can run, by running it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import edge
from edge.apps import options
from edge.apps.terminal import say
from edge.errors import BundleError, EngineError
from edge.runtime.engines import CHOICES

if TYPE_CHECKING:
    from edge.apps.doctor.checks import Finding

_LABELS = {"ok": "OK", "absent": "absent", "broken": "BROKEN"}


def doctor(
    bundle: Annotated[
        str, typer.Argument(help="Bundle to try the engines with, or the name of a demo.")
    ] = "demo-draft",
    engine: Annotated[
        str | None,
        typer.Option(
            help=f"Exit with 1 unless this engine runs here: {CHOICES}.",
            callback=options.known_engine,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check what works here, what is absent, what is broken, and how to fix it.

    Checks run the real thing: a step on the CPU and on the GPU, a copy, a kernel compilation.
    Nothing is installed or changed. Takes about ten seconds. Exits with 0 whatever it finds, unless
    --engine is given.
    """
    # imported late: child processes run `checks` as their main module
    from edge.apps.doctor import checks
    from edge.runtime.model import resolve

    folder = resolve(bundle)
    if not folder.exists():  # a misspelt name must not become a finding
        raise BundleError(
            "does not exist", file=folder, remedy="make one with: edge export CHECKPOINT -o BUNDLE"
        )
    findings = []
    for name in checks.CHECKS:
        finding = checks.examine(name, bundle)
        findings.append(finding)
        if not as_json:
            say(line(finding), flush=True)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        say(json.dumps({"version": edge.__version__, "checks": rows}, indent=1))
    else:
        say("\n" + summary(bundle, findings))
    if engine is not None:
        _require_engine(engine, findings)


def _require_engine(engine: str, findings: list[Finding]) -> None:
    """Raise EngineError, unless the engine runs, with the first problem that can be fixed."""
    from edge.apps.doctor.checks import ENGINES

    check, needs = ENGINES[engine]
    (verdict,) = (finding for finding in findings if finding.name == check)
    if verdict.status == "ok":
        return
    dependencies = {finding.name: finding for finding in findings if finding.name in needs}
    missing = [finding for finding in dependencies.values() if finding.status != "ok"]
    # detail and remedy must come from the same finding
    blocker = next((finding for finding in (*missing, verdict) if finding.remedy), verdict)
    raise EngineError(
        f"cannot run here: {blocker.detail}", field=f"engine {engine}", remedy=blocker.remedy
    )


def summary(bundle: str, findings: list[Finding]) -> str:
    """Say which engines run the bundle here, and whether anything has to be repaired."""
    from edge.apps.doctor.checks import ENGINES

    found = {finding.name: finding for finding in findings}
    engines = [name for name in ENGINES if name != "auto"]
    running = [name for name in engines if found[ENGINES[name][0]].status == "ok"]
    broken = [finding.name for finding in findings if finding.status == "broken"]
    if running:
        told = [f"{bundle} runs here on {', '.join(running)}."]
    else:
        told = [f"No engine runs {bundle} here: install what is absent above, or repair it."]
    if broken:
        told.append(f"To be repaired: {', '.join(broken)}.")
    elif running:
        told.append("Nothing is broken, and nothing that is absent is needed for that.")
    return " ".join(told)


def line(finding: Finding) -> str:
    """Format a finding, with its remedy on the next line."""
    text = f"{_LABELS[finding.status]:<7} {finding.name:<15} {finding.detail}"
    return text if finding.remedy is None else f"{text}\n{'':<24}→ {finding.remedy}"
