"""Power and energy: sources of readings, and a log that gives the joules of a time window."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from edge.apps.measure.machine import ROOT, folders, number, text

Unit = Literal["J", "W"]
PERIOD = 0.05  # seconds between readings
FEWEST = 4  # minimum readings in a window
_WHOLE_RAILS = ("VDD_IN", "VIN", "POM_5V_IN", "VIN_SYS_5V0", "VIN_SYS_20V", "Total Power")

_SM, _MEMORY = 1, 2  # nvmlClockType_t
_GPU = 0  # nvmlTemperatureSensors_t
# nvmlClocksThrottleReasons of nvml.h that slow work down
_THROTTLE_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class PowerSource(Protocol):
    """A source of power or energy readings of one or more rails.

    Attributes:
        name: name of the interface.
        unit: unit of `read`: joules since a fixed moment, or watts now.
        whole: rails that add up to the total without counting any twice.
    """

    name: str
    unit: Unit
    whole: tuple[str, ...]

    def read(self) -> Mapping[str, float]:
        """Return readings by rail, without rails that cannot be read now."""
        ...


# -- sources --------------------------------------------------------------------------------------


class Rails:
    """A Jetson's INA3221 monitors: in{n}_label, in{n}_input (mV), curr{n}_input (mA)."""

    name = "INA3221"
    unit: Unit = "W"

    def __init__(self, rails: Mapping[str, tuple[Path, Path]]) -> None:
        self._rails = rails
        self.whole: tuple[str, ...] = tuple(name for name in rails if name in _WHOLE_RAILS)[:1]

    @classmethod
    def find(cls, root: Path = ROOT) -> Rails | None:
        rails = {}
        for chip in folders(root / "sys/class/hwmon", "hwmon*"):
            if text(chip / "name") != "ina3221":
                continue
            for label in folders(chip, "in*_label"):
                index, name = label.name[2:-6], text(label)
                current = chip / f"curr{index}_input"
                if name and number(current) is not None:  # "sum of shunt voltages" has no current
                    rails[name] = (chip / f"in{index}_input", current)
        return cls(rails) if rails else None

    def read(self) -> Mapping[str, float]:
        watts = {}
        for name, (voltage, current) in self._rails.items():
            millivolts, milliamperes = number(voltage), number(current)
            if millivolts is not None and milliamperes is not None:
                watts[name] = millivolts * milliamperes / 1e6
        return watts


class Rapl:
    """Energy counters of x86 packages (powercap, energy_uj), which wrap around."""

    name = "RAPL"
    unit: Unit = "J"

    def __init__(self, zones: Mapping[str, Path]) -> None:
        self._zones = zones
        self._last: dict[str, int] = {}
        self._wraps: dict[str, int] = {}
        packages = tuple(name for name in zones if name.startswith("package"))
        # psys is the whole platform, packages included
        self.whole: tuple[str, ...] = ("psys",) if "psys" in zones else packages

    @classmethod
    def find(cls, root: Path = ROOT) -> Rapl | None:
        """Return the counters; None without any, or if only root may read them (since 2020)."""
        zones = {}
        for zone in folders(root / "sys/class/powercap", "intel-rapl:*"):
            name = text(zone / "name")
            if name and number(zone / "energy_uj") is not None:
                zones[f"{name} ({zone.name})" if name in zones else name] = zone
        return cls(zones) if zones else None

    def read(self) -> Mapping[str, float]:
        joules = {}
        for name, zone in self._zones.items():
            value = number(zone / "energy_uj")
            if value is None:
                continue
            if value < self._last.get(name, 0):
                self._wraps[name] = self._wraps.get(name, 0) + 1
            self._last[name] = value
            range_uj = number(zone / "max_energy_range_uj") or 0
            joules[name] = (value + self._wraps.get(name, 0) * range_uj) / 1e6
        return joules


class NvmlGpu:
    """Board power and other facts of the first GPU, through NVML's C library (nvml.h).

    The library comes with the driver.
    """

    name = "NVML"
    unit: Unit = "W"
    whole: tuple[str, ...] = ("board",)

    def __init__(self, library: Any) -> None:
        """`library`: NVML's functions, which return 0 for success."""
        self._library = library
        self._device = ctypes.c_void_p()
        self._throttles = 0

    @classmethod
    def find(cls) -> NvmlGpu | None:
        """Return the first GPU; None without a driver or a GPU."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        return cls.of(library)

    @classmethod
    def of(cls, library: Any) -> NvmlGpu | None:
        gpu = cls(library)
        handle = ctypes.byref(gpu._device)
        ready = library.nvmlInit_v2() == 0 == library.nvmlDeviceGetHandleByIndex_v2(0, handle)
        return gpu if ready else None

    def read(self) -> Mapping[str, float]:
        """Return board power in watts, and record the current throttle reasons."""
        self._throttles |= self._number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True) or 0
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return {} if milliwatts is None else {"board": milliwatts / 1e3}

    def facts(self) -> dict[str, Any]:
        """Return name, clocks, temperature, power limit and throttle reasons; None if unknown."""
        limit = self._number("nvmlDeviceGetPowerManagementLimit")
        return {
            "name": self._name(),
            "sm_clock_mhz": self._number("nvmlDeviceGetClockInfo", _SM),
            "memory_clock_mhz": self._number("nvmlDeviceGetClockInfo", _MEMORY),
            "temperature_c": self._number("nvmlDeviceGetTemperature", _GPU),
            "power_limit_w": None if limit is None else limit / 1e3,
            "throttled": [name for bit, name in _THROTTLE_REASONS.items() if self._throttles & bit],
        }

    def _number(self, function: str, *arguments: int, wide: bool = False) -> int | None:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        call = getattr(self._library, function, None)
        if call is None or call(self._device, *arguments, ctypes.byref(value)) != 0:
            return None
        return value.value

    def _name(self) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        if self._library.nvmlDeviceGetName(self._device, buffer, len(buffer)) != 0:
            return None
        return buffer.value.decode(errors="replace")


def why_none(root: Path = ROOT) -> str:
    """Return the reason why neither rails nor counters can be read."""
    if (root / "sys/class/powercap/intel-rapl:0").exists():
        return "the RAPL counters are readable by root only (chmod a+r …/intel-rapl:0/energy_uj)"
    return "no INA3221 rails and no RAPL counters (virtual machines have none)"


# -- the log --------------------------------------------------------------------------------------


@dataclass
class PowerLog:
    """Readings of one source over time.

    Attributes:
        times: clock time of each reading in seconds, on the same clock as windows.
        readings: one value per time, by rail.
    """

    unit: Unit
    times: list[float] = field(default_factory=list)
    readings: dict[str, list[float]] = field(default_factory=dict)

    def add(self, when: float, values: Mapping[str, float]) -> None:
        """Add a reading. A missing rail keeps its last value."""
        self.times.append(when)
        for rail in dict.fromkeys((*self.readings, *values)):
            row = self.readings.setdefault(rail, [])
            row += [values.get(rail, row[-1] if row else 0.0)] * (len(self.times) - len(row))

    def joules(self, rail: str, windows: Sequence[tuple[float, float]]) -> float | None:
        """Return the energy in all windows; None with fewer than FEWEST readings per window.

        With fewer, too much of it would belong to the time before and after the windows.
        """
        row, times = self.readings.get(rail), self.times
        if row is None or not windows:
            return None
        count = sum(1 for t in times if any(begin <= t <= end for begin, end in windows))
        if count < FEWEST * len(windows):
            return None
        energy = np.array(row)
        if self.unit == "W":  # joules since the first reading, by the trapezoid rule
            steps = np.diff(times) * (energy[1:] + energy[:-1]) / 2
            energy = np.concatenate([[0.0], np.cumsum(steps)])
        begins, ends = np.interp(np.array(windows).T, times, energy)
        return float((ends - begins).sum())


class Meter:
    """Context manager that reads a source every `period` seconds in a thread of its own."""

    def __init__(
        self,
        source: PowerSource,
        clock: Callable[[], float] = time.perf_counter,
        period: float = PERIOD,
    ) -> None:
        self.source = source
        self.log = PowerLog(source.unit)
        self._clock, self._period = clock, period
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edge-power", daemon=True)

    def __enter__(self) -> Meter:
        self._record()
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._record()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            self._record()

    def _record(self) -> None:
        self.log.add(self._clock(), self.source.read())
