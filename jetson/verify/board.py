"""The facts about a machine that a report has: read, never set."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import edge
from edge.apps.doctor.checks import Finding, examine
from edge.apps.measure.machine import ROOT, conditions, installed, machine, power_mode
from edge.runtime import memory

PACKAGES = (
    "numpy", "onnxruntime", "onnxruntime-gpu", "cuda-core", "cuda-bindings", "tokenizers", "triton",
    "torch",
)  # fmt: skip
# checks of `edge doctor` whose answers a result depends on
CHECKS = ("jetson", "driver", "cuda-core", "tensorrt", "plugins")
# zones that a Jetson has and nothing is read from
_ABSENT_ZONE_C = -200.0


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Everything that a result depends on."""
    return {
        "machine": machine(root),
        "found": {name: found(name).detail for name in CHECKS},
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "edge": edge.__version__,
        "commit": _commit(),
        "now": now(root),
    }


def now(root: Path = ROOT) -> dict[str, Any]:
    """What changes meanwhile: °C by sensor, bytes that are free, what throttles."""
    here = conditions(root)
    temperatures = {
        name: round(value, 1)
        for name, value in here.temperatures_c.items()
        if value > _ABSENT_ZONE_C
    }
    return {
        "power_mode": power_mode(root),
        "temperature_c": temperatures,
        "mem_available_bytes": memory.available_bytes(),
        "throttles": {name: count for name, count in here.throttles.items() if count},
    }


@cache
def found(check: str) -> Finding:
    """What `edge doctor` finds, asked once: what a step runs changes none of it."""
    return examine(check, "demo-draft")


def _commit() -> str | None:
    """The checkout's commit, marked where files were changed."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
