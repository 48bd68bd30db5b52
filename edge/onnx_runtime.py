"""The module `onnxruntime`, or an error that says how to install it.

ONNX Runtime's builds for CPUs and GPUs are packages of different names with the same module, and
pip lets one overwrite another. So edge requires none; extras do, and the user chooses.
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
        raise problem.__cause__ from None  # a signal interrupted the import
    absent = isinstance(problem, ModuleNotFoundError) and problem.name == "onnxruntime"
    raise EngineError(
        "ONNX Runtime is not installed" if absent else f"onnxruntime does not load: {problem}",
        remedy=REMEDY,
    ) from problem
