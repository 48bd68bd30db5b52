"""The facts about a machine that a report has: read, never set."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import edge
from edge.apps.measure.machine import ROOT, conditions, machine, power_mode, text
from edge.errors import EdgeError
from edge.runtime import memory
from edge.runtime.cuda import install
from edge.runtime.tensorrt import library

PACKAGES = (
    "numpy", "onnxruntime", "onnxruntime-gpu", "cuda-core", "cuda-bindings", "tokenizers", "triton",
    "torch",
)  # fmt: skip
_ASK = """
from edge.errors import EdgeError
from edge.runtime.tensorrt import bindings
try:
    print(bindings.dotted(bindings.load().version))
except EdgeError as problem:
    print(problem)
    raise SystemExit(1)
"""
# zones that a Jetson has and nothing is read from
_ABSENT_ZONE_C = -200.0


def facts(root: Path = ROOT) -> dict[str, Any]:
    """Everything that a result depends on."""
    return {
        "machine": machine(root),
        "l4t": l4t(root),
        "power_mode": power_mode(root),
        "cuda_driver": _driver(),
        "tensorrt": tensorrt()[0],
        "plugins": _plugins(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "edge": edge.__version__,
        "commit": _commit(),
        "now": now(root),
    }


def now(root: Path = ROOT) -> dict[str, Any]:
    """What changes meanwhile: °C by sensor, bytes that are free, what throttles."""
    found = conditions(root)
    temperatures = {
        name: round(value, 1)
        for name, value in found.temperatures_c.items()
        if value > _ABSENT_ZONE_C
    }
    return {
        "power_mode": power_mode(root),
        "temperature_c": temperatures,
        "mem_available_bytes": memory.available_bytes(),
        "throttles": {name: count for name, count in found.throttles.items() if count},
    }


def l4t(root: Path = ROOT) -> str | None:
    """ "36.4.3"; None on other machines."""
    release = text(root / "etc/nv_tegra_release") or ""
    found = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", release)
    return f"{found[1]}.{found[2]}" if found else None


def _driver() -> str | None:
    version = install.driver_version()
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


@cache
def tensorrt() -> tuple[str | None, str | None]:
    """TensorRT's version, or why it is not available. Asked in another process, which may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        return None, "importing TensorRT did not finish within 120 s"
    said = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        return said, None
    return None, said or f"importing TensorRT ended with {done.returncode}"


def _plugins() -> str | None:
    try:
        return str(library.find())
    except EdgeError:
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
