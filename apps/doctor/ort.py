"""Checks of `edge doctor` for the ort engine and its providers, and a step of a model.

Errors of engines are not caught here: the caller turns them into findings.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from importlib.util import find_spec

import numpy as np

from edge.errors import EngineError
from edge.runtime import ort_providers
from edge.runtime.cuda import install

Found = tuple[str, str, str | None]


def onnx_runtime(bundle: str) -> Found:
    """Report the providers of ONNX Runtime's build, and run a step on the CPU."""
    try:
        from edge.onnx_runtime import REMEDY, onnxruntime
    except EngineError as problem:
        status = "absent" if find_spec("onnxruntime") is None else "broken"
        return status, problem.message, problem.remedy
    built = ort_providers.available()
    # by the names that --provider takes; other providers of a build are not used here
    names = [name for name, provider in ort_providers.PROVIDERS.items() if provider in built]
    detail = f"{onnxruntime.__version__} for {', '.join(names)}"
    if len(packages := ort_providers.packages()) > 1:
        remedy = f"pip uninstall -y {' '.join(packages)}, then one of them: {REMEDY}"
        return "broken", f"{detail}: {' and '.join(packages)} overwrote each other", remedy
    logits = step(bundle, "ort", ort_providers.CPU)
    return "ok", f"{detail}: a step of {bundle}, {logits.size} logits", None


def on_cuda(bundle: str) -> Found:
    """Compare a step of the ort engine on the CUDA provider with one on the CPU."""
    return _compare_provider("cuda", bundle)


def on_tensorrt(bundle: str) -> Found:
    """Compare a step on the TensorRT provider, which builds engines first, with one on the CPU."""
    return _compare_provider("tensorrt", bundle)


def tensorrt_loads() -> bool:
    """Return whether the TensorRT that ONNX Runtime was built for is on the library path."""
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


def _compare_provider(provider: str, bundle: str) -> Found:
    try:
        built = ort_providers.available()
    except EngineError as problem:
        return "absent", problem.message, None
    if ort_providers.PROVIDERS[provider] not in built:
        return "absent", "the installed ONNX Runtime is built without it", None
    if install.driver_version() is None:
        return "absent", "no NVIDIA driver", None
    if provider == "tensorrt" and not tensorrt_loads():
        return "absent", "TensorRT (libnvinfer.so.10) is not on the library path", None
    return beside(bundle, "ort", provider)


def step(bundle: str, engine: str, provider: str | None = None) -> np.ndarray:
    """Return the logits after one token. Raises EdgeError; ValueError if they are not finite."""
    from edge.runtime.model import load

    with load(bundle, engine=engine, provider=provider) as model:
        state = model.engine.new_state(window=1, capacity=16)
        logits = model.engine.run(np.array([[1]]), state)[0, -1].copy()
    if not np.isfinite(logits).all():
        raise ValueError("a step gave logits that are not finite")
    out: np.ndarray = logits
    return out


def beside(bundle: str, engine: str, provider: str | None = None) -> tuple[str, str, str | None]:
    """Compare a step with the same step of ONNX Runtime on the CPU: status, detail, remedy."""
    logits = step(bundle, engine, provider)
    if find_spec("onnxruntime") is None:
        return "ok", f"a step of {bundle}; no ONNX Runtime is installed to compare it with", None
    reference = step(bundle, "ort", "cpu")
    difference = float(np.abs(logits - reference).max() / max(np.abs(reference).max(), 1e-9))
    detail = (
        f"a step of {bundle} differs from ONNX Runtime's by at most {difference:.1e} of the "
        "largest logit"
    )
    if logits.argmax() != reference.argmax():
        return "broken", f"{detail}: a different token", "report it, with edge doctor --json"
    return "ok", detail, None


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
