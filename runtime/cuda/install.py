"""cuda-core and the driver under it: found, or a line that says what to install."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType
from typing import NamedTuple

from edge.errors import EngineError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class Modules(NamedTuple):
    """What a device is driven with.

    Attributes:
        core: `cuda.core`.
        api: `cuda.bindings.driver`, the calls that cuda-core has no name for.
    """

    core: ModuleType
    api: ModuleType


def driver_version() -> int | None:
    """CUDA version the installed driver is for, 12060 for 12.6; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def load() -> Modules:
    """Import what drives a GPU. Raises EngineError: no driver, nothing installed, or not for it."""
    version = driver_version()
    if version is None:
        raise EngineError(
            f"no NVIDIA driver was found ({_DRIVER} cannot be loaded)",
            remedy="install the driver (Jetson: JetPack has it; container: --runtime nvidia), "
            "or leave --engine out",
        )
    try:
        core = importlib.import_module("cuda.core")
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as missing:
        raise EngineError(
            f"cuda-core cannot be imported: {missing}", remedy=requirement(version)
        ) from missing
    bindings = int(api.CUDA_VERSION)
    if bindings // 1000 > version // 1000:
        raise EngineError(
            f"cuda-bindings is for CUDA {dotted(bindings)}, the driver for {dotted(version)}",
            remedy=requirement(version),
        )
    return Modules(core, api)


def requirement(version: int | None) -> str:
    """The line that installs what a driver of this CUDA version is driven with."""
    if version is None:
        return 'pip install "mamba-edge[cuda]"'
    major = version // 1000
    return f'pip install "mamba-edge[cuda]" "cuda-bindings>={major},<{major + 1}"'


def dotted(version: int) -> str:
    """12060 as "12.6"."""
    return f"{version // 1000}.{version % 1000 // 10}"
