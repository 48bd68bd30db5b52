"""What `edge doctor` looks at for the ort engine: ONNX Runtime, and its providers on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

from edge.apps.doctor.step import beside, step
from edge.errors import EngineError
from edge.runtime import ort_providers
from edge.runtime.cuda import install

Found = tuple[str, str, str | None]


def onnx_runtime(bundle: str) -> Found:
    """The providers of its build, and a step on the CPU; how long that takes is `edge profile`'s
    business.
    """
    try:
        from edge.onnx_runtime import REMEDY, onnxruntime
    except EngineError as problem:
        return _absence(), problem.message, problem.remedy
    built = ort_providers.available()
    # by the names that --provider takes; a build may have others, which nothing here runs on
    names = [name for name, theirs in ort_providers.PROVIDERS.items() if theirs in built]
    detail = f"{onnxruntime.__version__} for {', '.join(names)}"
    if len(found := ort_providers.packages()) > 1:
        remedy = f"pip uninstall -y {' '.join(found)}, then one of them: {REMEDY}"
        return "broken", f"{detail}: {' and '.join(found)} overwrote each other", remedy
    logits = step(bundle, "ort", ort_providers.CPU)
    return "ok", f"{detail}: a step of {bundle}, {logits.size} logits", None


def on_cuda(bundle: str) -> Found:
    """A step of the ort engine on the CUDA provider, beside the CPU's."""
    return _on("cuda", bundle)


def on_tensorrt(bundle: str) -> Found:
    """A step of the ort engine on the TensorRT provider, which builds its engines for it first."""
    return _on("tensorrt", bundle)


def _on(provider: str, bundle: str) -> Found:
    try:
        built = ort_providers.available()
    except EngineError as problem:
        return "absent", problem.message, None
    if ort_providers.PROVIDERS[provider] not in built:
        return "absent", "the installed ONNX Runtime is built without it", None
    if install.driver_version() is None:
        return "absent", "no NVIDIA driver", None
    return beside(bundle, "ort", provider)


def _absence() -> str:
    return "absent" if find_spec("onnxruntime") is None else "broken"
