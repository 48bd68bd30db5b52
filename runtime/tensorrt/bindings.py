"""Import of TensorRT's Python bindings, with an install hint for this platform if missing.

TensorRT comes from JetPack or NVIDIA's packages, never with this one. Two libraries share the
interface: TensorRT itself, which runs plugins, and TensorRT for RTX, which builds for consumer GPUs
(also on machines without a GPU) and has no plugins.
"""

from __future__ import annotations

import importlib
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from edge.errors import EngineError
from edge.runtime.cuda import install

Kind = Literal["tensorrt", "rtx"]

# the first version with IPluginV3 and aliased plugin inputs; part of JetPack 6.2
OLDEST = (10, 3)

_NAMES: dict[Kind, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_TITLE: dict[Kind, str] = {"tensorrt": "TensorRT", "rtx": "TensorRT for RTX"}
RTX_COMMAND = "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings"
# L4T's major release → JetPack, and the Python version that its TensorRT supports
_JETPACKS = {36: ("JetPack 6", "3.10"), 38: ("JetPack 7", "3.12"), 39: ("JetPack 7", "3.12")}
_RELEASE = Path("/etc/nv_tegra_release")


@dataclass(frozen=True)
class TensorRT:
    """An imported TensorRT.

    Attributes:
        kind: which of the two libraries.
        module: its Python module.
        version: version as numbers, such as (10, 3, 0).
    """

    kind: Kind
    module: ModuleType
    version: tuple[int, ...]

    @property
    def title(self) -> str:
        """Name and version, such as "TensorRT 10.3.0"."""
        return f"{_TITLE[self.kind]} {dotted(self.version)}"


def load(kind: Kind = "tensorrt") -> TensorRT:
    """Import a TensorRT. Raises EngineError if it is missing, broken or too old.

    Where only TensorRT for RTX is installed, the error for TensorRT names `edge build --rtx`.
    """
    problems: list[Exception] = []
    for name in _NAMES[kind]:
        try:
            return _check(kind, importlib.import_module(name))
        except ModuleNotFoundError as missing:
            if missing.name != name:
                problems.append(missing)
        except (ImportError, OSError, RuntimeError, AttributeError) as broken:
            problems.append(broken)
    if problems:
        raise EngineError(
            f"the Python package of {_TITLE[kind]} is installed but cannot be imported: its "
            f"libraries are missing or do not match: {problems[0]}",
            field=_NAMES[kind][0],
            remedy=how_to_install(kind),
        ) from problems[0]
    raise EngineError(
        f"{_TITLE[kind]} is not installed for this Python {platform.python_version()}",
        field=_NAMES[kind][0],
        remedy=_instead(kind) + how_to_install(kind),
    )


def _instead(kind: Kind) -> str:
    """Return what TensorRT for RTX can do where TensorRT is not installed; "" if it is not."""
    if kind == "rtx":
        return ""
    try:
        other = load("rtx")
    except EngineError:
        return ""
    return f"edge build BUNDLE --rtx builds with {other.title}, which is installed; TensorRT: "


def _check(kind: Kind, module: ModuleType) -> TensorRT:
    if not hasattr(module, "Builder") or not hasattr(module, "OnnxParser"):
        # a folder of that name, or a package index's placeholder for the real package
        raise ImportError(f"{module.__name__} has no Builder: it is a placeholder")
    version = numbers(str(module.__version__))
    if kind == "tensorrt" and version < OLDEST:
        raise EngineError(
            f"is TensorRT {dotted(version)}, at least {dotted(OLDEST)} is needed",
            field=module.__name__,
            remedy=how_to_install(kind),
        )
    return TensorRT(kind, module, version)


def numbers(version: str) -> tuple[int, ...]:
    """Parse the part of a version that engines depend on: "10.3.0.26" becomes (10, 3, 0).

    Raises ImportError for malformed versions.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ImportError(f"its version is {version!r:.40}")
    return tuple(int(part) for part in match.groups("0"))


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def how_to_install(kind: Kind, release: Path = _RELEASE) -> str:
    """Return how to install it on this machine; a Jetson is recognized by the file `release`."""
    if kind == "rtx":
        if (sys.platform, platform.machine()) not in (("linux", "x86_64"), ("win32", "AMD64")):
            return "TensorRT for RTX runs on x86-64 only: build without --rtx on this machine"
        return RTX_COMMAND
    l4t = jetson_release(release)
    if l4t is not None:
        jetpack, python = _JETPACKS.get(l4t, ("JetPack", "that of the system"))
        return (
            f"{jetpack}: sudo apt install tensorrt python3-libnvinfer, and a virtual environment "
            f"that sees it, of Python {python}: python3 -m venv --system-site-packages .venv"
        )
    driver = install.driver_version()
    major = 12 if driver is not None and driver < 13000 else 13
    return f"pip install tensorrt-cu{major}, TensorRT 10.3 to 11; the GPU driver is needed too"


def jetson_release(release: Path = _RELEASE) -> int | None:
    """Return L4T's major release (36 is JetPack 6); None on other machines."""
    try:
        match = re.match(r"# R(\d+) ", release.read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return None if match is None else int(match[1])
