"""The module `onnxruntime`, or an error that says how to get it.

ONNX Runtime's builds, for CPUs and for GPUs, are packages of several names with one module, and pip
puts one over another. So edge requires none of them; extras do, and who installs chooses.
"""

from edge.errors import EngineError

REMEDY = (
    'pip install "mamba-edge[ort]" for a CPU, or "mamba-edge[ort-gpu]" for an NVIDIA GPU, '
    "not both; in a checkout make chat, on a Jetson jetson/install.sh"
)

try:
    import onnxruntime as onnxruntime  # type: ignore[import-untyped, unused-ignore]
except ImportError as problem:
    if problem.__cause__ is not None and not isinstance(problem.__cause__, Exception):
        raise problem.__cause__ from None  # a signal came while it was loading
    absent = isinstance(problem, ModuleNotFoundError) and problem.name == "onnxruntime"
    raise EngineError(
        "ONNX Runtime is not installed" if absent else f"onnxruntime does not load: {problem}",
        remedy=REMEDY,
    ) from problem
