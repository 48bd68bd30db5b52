"""What the CPU offers: cores this process may use, instructions that change results."""

from __future__ import annotations

import math
import os
from pathlib import Path

MOST_THREADS = 1 << 10  # of a model; with more, starting them alone takes seconds


def usable_cores() -> int:
    """Physical cores this process may run on, at most its control group's share; at least 1."""
    allowed = os.sched_getaffinity(0)
    cores = {_core(number) for number in allowed}
    quota = _quota()
    return max(1, len(cores) if quota is None else min(len(cores), math.ceil(quota)))


def has_vnni() -> bool:
    """Whether 8-bit products accumulate in 32 bits. True where nothing says otherwise (ARM)."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True
    flags = [line for line in info.splitlines() if line.startswith("flags")]
    return not flags or "avx512_vnni" in flags[0] or "avx_vnni" in flags[0]


def _core(number: int) -> str:
    """Names a physical core: CPUs that share one are the same."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{number}/topology/core_cpus_list").read_text()
    except OSError:
        return str(number)


def _quota() -> float | None:
    """CPUs the control group (version 2) allows, or None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)
