"""Checks of `edge doctor` for the tensorrt engine: TensorRT, the plugin library, an engine."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from edge.apps.doctor.ort import beside
from edge.errors import EngineError
from edge.runtime.cuda import install

if TYPE_CHECKING:
    from edge.runtime.tensorrt.bindings import Kind

LIBRARIES = ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so.8")

Found = tuple[str, str, str | None]


def _installed() -> tuple[dict[Kind, str], dict[Kind, EngineError]]:
    """Import TensorRT and TensorRT for RTX; return their titles, and what keeps the others out."""
    from edge.runtime.tensorrt import bindings

    titles: dict[Kind, str] = {}
    problems: dict[Kind, EngineError] = {}
    kinds: tuple[Kind, ...] = ("tensorrt", "rtx")
    for kind in kinds:
        try:
            titles[kind] = bindings.load(kind).title
        except EngineError as problem:
            problems[kind] = problem
    return titles, problems


def tensorrt(_: str) -> Found:
    """Import TensorRT and TensorRT for RTX."""
    titles, problems = _installed()
    if titles:
        return "ok", ", ".join(titles.values()), None
    absent = problems["tensorrt"]
    library = shared_library()
    if library is not None:
        return "broken", f"{library} is installed; {absent.message}", absent.remedy
    return "absent", absent.message, absent.remedy


def shared_library() -> str | None:
    """Return the name and version of TensorRT's shared library, without its Python bindings."""
    for name in LIBRARIES:
        try:
            number = int(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
        # versions 8 and 9 report 8601 for 8.6.1; 10 and later report 100300 for 10.3.0
        parts = (number // 10_000, number // 100 % 100, number % 100)
        if number < 100_00:
            parts = (number // 1000, number // 100 % 10, number % 100)
        return f"{name} {'.'.join(map(str, parts))}"
    return None


def plugins(_: str) -> Found:
    """Find the plugin library, check its version, and register it with TensorRT."""
    from edge.runtime.tensorrt import bindings, library

    try:
        path = library.find()
    except EngineError as problem:
        # a library that is named but missing is a mistake; one that nobody built is not
        status = "broken" if problem.file else "absent"
        without = "" if problem.file or list(_installed()[0]) != ["rtx"] else "--rtx needs none; "
        return status, problem.message, f"{without}{problem.remedy}"
    plugin_library = library.open_library(path)
    detail = f"{path}, ABI {library.ABI}, built for TensorRT {plugin_library.built_for}"
    try:
        trt = bindings.load("tensorrt")
    except EngineError as problem:
        return "absent", f"{detail}; {problem.message}", problem.remedy
    library.register(trt, plugin_library)
    return "ok", f"{detail}; {trt.title} accepts it", None


def tensorrt_engine(bundle: str) -> Found:
    """Compare a step of the engine that `edge build` made with the same step on the CPU."""
    from edge.bundle import open_bundle
    from edge.runtime.model import resolve
    from edge.runtime.tensorrt import cache

    with open_bundle(resolve(bundle)) as opened:
        engines = cache.entries(opened.fingerprint)
    if not engines:
        detail, titles = f"no engine of {bundle} is built", _installed()[0]
        if not titles:
            return "absent", f"{detail}, and none can be: TensorRT is not installed", None
        if install.driver_version() is None:
            return "absent", f"{detail}, and none can be: no NVIDIA driver", None
        flags = () if "tensorrt" in titles else ("--rtx",)
        return "absent", detail, f"build it: {cache.command(bundle, None, *flags)}"
    if install.driver_version() is None:
        return "absent", f"{len(engines)} engines of {bundle}; no NVIDIA driver", None
    return beside(bundle, "tensorrt")
