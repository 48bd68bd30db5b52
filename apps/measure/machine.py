"""The machine of a measurement: hardware, settings, and conditions during the measurement."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

import edge
from edge.runtime import ort_providers

ROOT = Path("/")
BUSY = 0.1  # maximum share of the processor used by others for times to be trusted
_CPUS = "sys/devices/system/cpu"
_COOLING = "cooling"


# -- small files in /proc and /sys: None instead of an error --------------------------------------


def text(path: Path) -> str | None:
    """Return a file's content, stripped; None if it is empty or cannot be read."""
    try:
        return path.read_text(errors="replace").strip("\0 \n") or None
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the whole number that a file holds; None if it holds anything else."""
    content = text(path)
    try:
        return None if content is None else int(content)
    except ValueError:
        return None


def folders(parent: Path, pattern: str) -> Iterator[Path]:
    """Yield matching paths sorted by name, with numbers in numeric order."""
    try:
        yield from sorted(parent.glob(pattern), key=lambda path: (len(path.name), path.name))
    except OSError:
        return


# -- hardware -------------------------------------------------------------------------------------


def machine(root: Path = ROOT) -> dict[str, object]:
    """Return processor, board, usable CPUs, memory, system and Python version."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(root),
        "board": text(root / "proc/device-tree/model"),
        "usable_cpus": usable,
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def stamp() -> str:
    """Return the current date and time in UTC, for a report."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def installed(package: str) -> str | None:
    """Return the version of a distribution or None; for ONNX Runtime, of the installed build."""
    builds = ort_providers.packages() if package == "onnxruntime" else ()
    try:
        return importlib.metadata.version(builds[0] if builds else package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name(root: Path) -> str:
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        if line.lower().startswith(("model name", "hardware")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# -- settings -------------------------------------------------------------------------------------


def governor(root: Path = ROOT) -> str | None:
    """Return the frequency governors of the CPUs, None without any."""
    paths = folders(root / _CPUS, "cpu[0-9]*")
    governors = {text(path / "cpufreq/scaling_governor") for path in paths}
    return ", ".join(sorted(name for name in governors if name)) or None


def power_mode(root: Path = ROOT) -> str | None:
    """Return the name of a Jetson's nvpmodel mode, or the platform profile of a laptop's firmware.

    nvpmodel keeps `pmode:0002` in /var/lib/nvpmodel/status, and the names in /etc/nvpmodel.conf.
    """
    status = re.search(r"pmode:0*(\d+)", text(root / "var/lib/nvpmodel/status") or "")
    if status is None:
        return text(root / "sys/firmware/acpi/platform_profile")
    pattern = r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>"
    names: dict[str, str] = dict(re.findall(pattern, text(root / "etc/nvpmodel.conf") or ""))
    return names.get(status[1], f"mode {status[1]}")


# -- conditions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """Conditions at one moment.

    Attributes:
        clocks_mhz: clock of each CPU that reports one.
        temperatures_c: temperature by sensor.
        throttles: number of events since boot, or state of a cooling device, by name.
    """

    clocks_mhz: tuple[float, ...]
    temperatures_c: Mapping[str, float]
    throttles: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "clock_mhz": {"min": min(self.clocks_mhz), "max": max(self.clocks_mhz)}
            if self.clocks_mhz
            else None,
            "temperature_c": dict(self.temperatures_c),
        }


def conditions(root: Path = ROOT) -> Conditions:
    """Read the current conditions."""
    return Conditions(_clocks(root), _temperatures(root), _throttles(root))


def throttled(before: Conditions, after: Conditions) -> list[str] | None:
    """Return the names of what limited the machine; None if it has no counters.

    These are counters that rose, and cooling devices that were active at either moment.
    """
    if not after.throttles:
        return None
    first = before.throttles
    return sorted(
        name
        for name, count in after.throttles.items()
        if count > first.get(name, 0) or (name.startswith(_COOLING) and first.get(name, 0) > 0)
    )


def _clocks(root: Path) -> tuple[float, ...]:
    paths = folders(root / _CPUS, "cpu[0-9]*")
    frequencies = [number(path / "cpufreq/scaling_cur_freq") for path in paths]
    if clocks := [kilohertz / 1e3 for kilohertz in frequencies if kilohertz]:
        return tuple(clocks)
    lines = (text(root / "proc/cpuinfo") or "").splitlines()
    values = [line.partition(":")[2] for line in lines if line.startswith("cpu MHz")]
    return tuple(float(value) for value in values)


def _temperatures(root: Path) -> dict[str, float]:
    temperatures: dict[str, float] = {}
    for zone in folders(root / "sys/class/thermal", "thermal_zone*"):
        name, value = text(zone / "type"), number(zone / "temp")
        if name and value is not None:
            temperatures[name] = value / 1e3
    for chip in folders(root / "sys/class/hwmon", "hwmon*"):
        for file in folders(chip, "temp*_input"):
            value = number(file)
            if value is not None:
                label = text(chip / file.name.replace("_input", "_label")) or file.name[:-6]
                temperatures[f"{text(chip / 'name') or chip.name} {label}"] = value / 1e3
    return temperatures


def _throttles(root: Path) -> dict[str, int]:
    """Read counters of x86 CPUs and of a Jetson's over-current alarms, and cooling states."""
    counts: dict[str, int] = {}
    for cpu in folders(root / _CPUS, "cpu[0-9]*"):
        for file in folders(cpu / "thermal_throttle", "*_throttle_count"):
            _store(counts, f"{cpu.name} {file.name.removesuffix('_throttle_count')}", number(file))
    for chip in folders(root / "sys/class/hwmon", "hwmon*"):
        for file in folders(chip, "oc*_event_cnt"):
            _store(counts, f"over-current {file.name.removesuffix('_event_cnt')}", number(file))
    for device in folders(root / "sys/class/thermal", "cooling_device*"):
        kind = text(device / "type") or device.name
        # a running fan does not throttle, and TCC Offset is a setting
        if "fan" not in kind.lower() and kind != "TCC Offset":
            _store(counts, f"{_COOLING} {kind} ({device.name})", number(device / "cur_state"))
    return counts


def _store(counts: dict[str, int], name: str, value: int | None) -> None:
    if value is not None:
        counts[name] = value


# -- other programs -------------------------------------------------------------------------------


class OtherLoad:
    """Processor use by other programs since this object was made."""

    def __init__(self) -> None:
        self._system, self._own = _busy_and_total(), _own_seconds()

    def share(self) -> float:
        """Return the share of all CPUs used by others, 0 to 1."""
        (busy, everything), own = _busy_and_total(), _own_seconds()
        total = everything - self._system[1]
        if total <= 0:
            return 0.0
        others = (busy - self._system[0]) - (own - self._own)
        return min(1.0, max(0.0, others / total))

    def facts(self) -> dict[str, Any]:
        """Return the header of a report: date, commit, machine, and its use by other programs."""
        share = self.share()
        return {
            "date": stamp(),
            "commit": commit(),
            "machine": machine(),
            "used_by_others": share,
            "trustworthy": share <= BUSY,
        }


def commit(file: Path = Path(edge.__file__)) -> str | None:
    """Return the commit of the checkout that `file` belongs to, with `-dirty` if it has changes.

    None if the package is installed without a checkout, or git is missing.
    """

    def git(*arguments: str) -> str:
        found = subprocess.run(
            ["git", "-C", file.parent, *arguments], capture_output=True, text=True, check=True
        )
        return found.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # not of a repository around it
        return git("describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None


def _busy_and_total() -> tuple[float, float]:
    times = psutil.cpu_times()
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system
