"""The facts about a machine in a report: read, never set."""

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
# checks of `edge doctor` that results depend on
CHECKS = ("jetson", "driver", "cuda-core", "tensorrt", "plugins")
# what thermal zones without a sensor read at most
_ABSENT_ZONE_C = -200.0


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Return everything that results depend on."""
    return {
        "machine": machine(root),
        "found": {name: found(name).detail for name in CHECKS},
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "edge": edge.__version__,
        "commit": _commit(),
        "now": now(root),
    }


def now(root: Path = ROOT) -> dict[str, Any]:
    """Return what changes over time: power mode, °C by sensor, free bytes, throttling counts."""
    current = conditions(root)
    temperatures = {
        name: round(value, 1)
        for name, value in current.temperatures_c.items()
        if value > _ABSENT_ZONE_C
    }
    return {
        "power_mode": power_mode(root),
        "temperature_c": temperatures,
        "mem_available_bytes": memory.available_bytes(),
        "throttles": {name: count for name, count in current.throttles.items() if count},
    }


@cache
def found(check: str) -> Finding:
    """Return a finding of `edge doctor`. Cached, because no step changes it."""
    return examine(check, "demo-draft")


def _commit() -> str | None:
    """Return the checkout's commit, marked if files were changed."""
    folder = Path(__file__).parent
    try:
        completed = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=folder, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None
