"""Run the steps in order, each in its own process, and keep the report up to date."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from edge.bundle import open_bundle
from edge.errors import EdgeError
from edge.runtime.model import resolve
from jetson.verify import board
from jetson.verify.report import BoardReport, Result, Status, load, tail
from jetson.verify.steps import NOT_RUN, STEPS, VerifyStep, missing

ROOT = Path(__file__).resolve().parents[2]


def run(step: VerifyStep, bundle: str, folder: Path, limit_s: float) -> Result:
    """Run one step. Failures and crashes are results too."""
    before, began = board.now(), time.monotonic()
    skip_reason = missing(step, bundle)
    if skip_reason is None and limit_s < 1:
        skip_reason = "no time was left; --minutes gives more"
    if skip_reason is not None:
        return Result(step.name, step.claim, "not run", skip_reason, before=before, after=before)
    log = folder / f"{step.name}.log"
    out = folder / step.name
    out.mkdir(exist_ok=True)
    limit_s = min(limit_s, step.limit_s)
    code = _process(step, step.line(bundle, out), log, limit_s)
    text = log.read_text(errors="replace")
    status, reason = _verdict(code, text, limit_s)
    figures = _figures(text)
    return Result(
        step.name,
        step.claim,
        status,
        reason,
        round(time.monotonic() - began, 1),
        figures,
        "" if status == "ok" and figures else tail(text),
        before,
        board.now(),
    )


def _process(step: VerifyStep, command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Return the exit code, or None after `limit_s`. Kill all processes of a step that is late."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1", **(step.environment or {}))
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part
    )
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _verdict(code: int | None, text: str, limit_s: float) -> tuple[Status, str]:
    last = (text.strip().splitlines() or [""])[-1]
    if code == 0:
        return "ok", ""
    if code == NOT_RUN:
        return "not run", last.removeprefix("not run: ")
    if code is None:
        return "wrong", f"did not finish within {limit_s:.0f} s"
    if code < 0:
        return "wrong", f"ended with {signal.Signals(-code).name}"
    return "wrong", f"exit code {code}"


def _figures(text: str) -> dict[str, Any]:
    """Return the JSON object that a step's output ends with, or {}."""
    lines = text.strip().splitlines()
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            try:
                parsed = json.loads("\n".join(lines[start:]))
            except ValueError:
                return {}
            return parsed if isinstance(parsed, dict) else {}
    return {}


def verify(
    bundle: str,
    folder: Path,
    minutes: float,
    steps: Sequence[VerifyStep] = STEPS,
    *,
    again: bool = False,
) -> BoardReport:
    """Run all steps that are not ok in an earlier report of the same machine and version.

    `again`: run those that are ok too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = board.facts()
    report = None if again else load(folder, bundle, facts)
    if report is None:
        report = BoardReport(
            bundle, datetime.now().astimezone().isoformat(timespec="seconds"), facts
        )
    end = time.monotonic() + 60 * minutes
    for step in steps:
        if report.status(step.name) == "ok":
            print(f"ok       {step.name:<17} (before)", flush=True)
            continue
        result = run(step, bundle, folder, end - time.monotonic())
        report.put(result)
        report.save(folder)
        reason = f": {result.reason}" if result.reason else ""
        print(f"{result.status:<8} {step.name:<17} {result.seconds:6.1f} s{reason}", flush=True)
    return report


def main() -> int:
    step_names = ",".join(step.name for step in STEPS)
    parser = argparse.ArgumentParser(prog="jetson/verify.sh", description=__doc__)
    parser.add_argument(
        "bundle", nargs="?", default="demo", help="bundle with kernels for this GPU"
    )
    parser.add_argument("-o", "--out", type=Path, default=None, help="folder of the report")
    parser.add_argument("--minutes", type=float, default=60, help="limit of all steps together")
    parser.add_argument("--again", action="store_true", help="run steps that were ok too")
    parser.add_argument("--only", help=f"run only these steps, of {step_names}")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [step.name for step in STEPS]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"unknown steps {', '.join(sorted(unknown))}; there are {step_names}")
    steps = [step for step in STEPS if step.name in names]
    folder = options.out or ROOT / "build" / "verify"
    bundle = options.bundle
    try:
        open_bundle(resolve(bundle)).close()
    except EdgeError as problem:  # every step would fail with it
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if os.path.isdir(bundle):
        bundle = os.path.abspath(bundle)  # steps run in the checkout
    report = verify(bundle, folder.resolve(), options.minutes, steps, again=options.again)
    wrong = [result.name for result in report.results if result.status == "wrong"]
    not_run = [result.name for result in report.results if result.status == "not run"]
    print(f"report: {folder / 'report.md'}")
    if wrong:
        print(f"WRONG: {', '.join(wrong)}; their output is in the report", file=sys.stderr)
        return 1
    print(f"nothing is wrong; {len(not_run)} of {len(report.results)} steps did not run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
