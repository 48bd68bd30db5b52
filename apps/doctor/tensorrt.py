"""The checks of `edge doctor` for the tensorrt engine: TensorRT, the plugin library, an engine."""

from __future__ import annotations

import ctypes

from edge.apps.doctor.ort import beside
from edge.errors import EngineError
from edge.runtime.cuda import install

LIBRARIES = ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so.8")

Found = tuple[str, str, str | None]


def tensorrt(_: str) -> Found:
    """TensorRT and TensorRT for RTX, by importing them."""
    from edge.runtime.tensorrt import bindings
    from edge.runtime.tensorrt.bindings import Kind

    titles, problems = [], {}
    kinds: tuple[Kind, ...] = ("tensorrt", "rtx")
    for kind in kinds:
        try:
            titles.append(bindings.load(kind).title)
        except EngineError as problem:
            problems[kind] = problem
    if titles:
        return "ok", ", ".join(titles), None
    absent = problems["tensorrt"]
    library = shared_library()
    if library is not None:
        return "broken", f"{library} is here; {absent.message}", absent.remedy
    return "absent", absent.message, absent.remedy


def shared_library() -> str | None:
    """TensorRT's own library, without Python: its name and version."""
    for name in LIBRARIES:
        try:
            number = int(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
        # 8 and 9 write 8601 for 8.6.1, 10 and later 100300 for 10.3.0
        parts = (number // 10_000, number // 100 % 100, number % 100)
        if number < 100_00:
            parts = (number // 1000, number // 100 % 10, number % 100)
        return f"{name} {'.'.join(map(str, parts))}"
    return None


def plugins(_: str) -> Found:
    """The plugin library: found, of this version, for this TensorRT, and taken by it."""
    from edge.runtime.tensorrt import bindings, library

    try:
        path = library.find()
    except EngineError as problem:
        # a library that is named and missing is a mistake, one that nobody built is not
        status = "broken" if problem.file else "absent"
        return status, problem.message, problem.remedy
    found = library.open_library(path)
    detail = f"{path}, ABI {library.ABI}, built for TensorRT {found.built_for}"
    try:
        trt = bindings.load("tensorrt")
    except EngineError as problem:
        return "absent", f"{detail}; {problem.message}", problem.remedy
    library.register(trt, found)
    return "ok", f"{detail}; {trt.title} takes it", None


def tensorrt_engine(bundle: str) -> Found:
    """The engine that `edge build` made of the bundle: a step of it, beside the CPU's."""
    from edge.bundle import open_bundle
    from edge.runtime.model import resolve
    from edge.runtime.tensorrt import cache

    with open_bundle(resolve(bundle)) as opened:
        there = cache.entries(opened.fingerprint)
    if not there:
        detail = f"no engine of {bundle} is built"
        if tensorrt(bundle)[0] != "ok":
            return "absent", f"{detail}, nor could one be: TensorRT is not here", None
        return "absent", detail, f"build it: {cache.command(bundle)}"
    if install.driver_version() is None:
        return "absent", f"{len(there)} engines of {bundle}; no NVIDIA driver", None
    return beside(bundle, "tensorrt")
