"""Import of cuda-core and the driver bindings, with an install hint where they are missing."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType
from typing import NamedTuple

from edge.errors import EngineError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class Modules(NamedTuple):
    """The modules that drive a device.

    Attributes:
        core: `cuda.core`.
        api: `cuda.bindings.driver`, for calls that cuda-core does not wrap.
    """

    core: ModuleType
    api: ModuleType


def driver_version() -> int | None:
    """Return the CUDA version of the installed driver, 12060 for 12.6; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(_DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value


def load() -> Modules:
    """Import the modules that drive a GPU.

    Raises EngineError for a missing driver or package, or bindings newer than the driver.
    """
    version = driver_version()
    if version is None:
        raise EngineError(
            f"no NVIDIA driver was found ({_DRIVER} cannot be loaded)",
            remedy="install the driver, which JetPack has on a Jetson; start a container with "
            "--runtime nvidia; or leave --engine out",
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
    """Return the pip command that installs the modules for a driver of this CUDA version."""
    if version is None:
        return 'pip install "mamba-edge[cuda]"'
    major = version // 1000
    return f'pip install "mamba-edge[cuda]" "cuda-bindings>={major},<{major + 1}"'


def dotted(version: int) -> str:
    """Format a CUDA version: 12060 becomes "12.6"."""
    return f"{version // 1000}.{version % 1000 // 10}"
