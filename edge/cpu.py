"""The CPU: cores this process may use, and instructions that change results."""

from __future__ import annotations

import math
import os
from pathlib import Path

MOST_THREADS = 1 << 10  # per model; starting more would take seconds


def usable_cores() -> int:
    """Return the number of physical cores this process may use: 1 to its control group's share."""
    allowed = os.sched_getaffinity(0)
    cores = {_core(number) for number in allowed}
    quota = _quota()
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def has_vnni() -> bool:
    """Return whether 8-bit products accumulate in 32 bits; True if the CPU lists no flags (ARM)."""
    flags = _flags()
    return not flags or "avx512_vnni" in flags or "avx_vnni" in flags


def has_amx() -> bool:
    """Return whether the CPU multiplies tiles of int8."""
    return "amx_int8" in _flags()


def _flags() -> list[str]:
    """Return the instruction sets that Linux lists, none on ARM."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return next((line.split() for line in info.splitlines() if line.startswith("flags")), [])


def _core(number: int) -> str:
    """Return an id of a CPU's physical core, the same for all CPUs on that core."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{number}/topology/core_cpus_list").read_text()
    except OSError:
        return str(number)


def _quota() -> float | None:
    """Return the number of CPUs the control group (v2) allows, or None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)
