"""A desktop GPU through NVML's C library (nvml.h), which comes with the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from edge.apps.profiling.power import Unit

LIBRARY = "libnvidia-ml.so.1"
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_GPU = 0  # nvmlTemperatureSensors_t
# nvmlClocksThrottleReasons of nvml.h: those that slow work down
_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


class Gpu:
    """The first GPU, as a source of its board's power and of what else is to be said."""

    name = "NVML"
    unit: Unit = "W"
    whole: tuple[str, ...] = ("board",)

    def __init__(self, library: Any) -> None:
        """`library` has NVML's functions; they return 0 for success."""
        self._library = library
        self._device = ctypes.c_void_p()
        self._throttles = 0

    @classmethod
    def find(cls) -> Gpu | None:
        """None without a driver or a GPU."""
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        return cls.of(library)

    @classmethod
    def of(cls, library: Any) -> Gpu | None:
        found = cls(library)
        if library.nvmlInit_v2() != 0:
            return None
        return found if library.nvmlDeviceGetHandleByIndex_v2(
            0, ctypes.byref(found._device)
        ) == 0 else None  # fmt: skip

    def read(self) -> Mapping[str, float]:
        """Board power in watts; notes what throttles meanwhile."""
        self._throttles |= self._number("nvmlDeviceGetCurrentClocksThrottleReasons", wide=True) or 0
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        return {} if milliwatts is None else {"board": milliwatts / 1e3}

    def facts(self) -> dict[str, Any]:
        """Name, clocks, temperature, power limit, what throttled; None where it does not say."""
        limit = self._number("nvmlDeviceGetPowerManagementLimit")
        return {
            "name": self._name(),
            "sm_clock_mhz": self._number("nvmlDeviceGetClockInfo", _SM),
            "memory_clock_mhz": self._number("nvmlDeviceGetClockInfo", _MEMORY),
            "temperature_c": self._number("nvmlDeviceGetTemperature", _GPU),
            "power_limit_w": None if limit is None else limit / 1e3,
            "throttled": [name for bit, name in _REASONS.items() if self._throttles & bit],
        }

    def _number(self, function: str, *which: int, wide: bool = False) -> int | None:
        value = ctypes.c_ulonglong() if wide else ctypes.c_uint()
        call = getattr(self._library, function, None)
        if call is None or call(self._device, *which, ctypes.byref(value)) != 0:
            return None
        return value.value

    def _name(self) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        if self._library.nvmlDeviceGetName(self._device, buffer, len(buffer)) != 0:
            return None
        return buffer.value.decode(errors="replace")
