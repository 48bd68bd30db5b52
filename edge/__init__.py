"""edge: quantized Mamba, Mamba-2 and hybrid language models on small NVIDIA devices.

Importing this package loads nothing heavy: public names are fetched when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edge.config import ModelConfig
    from edge.errors import (
        BundleError,
        CheckpointError,
        ContextFullError,
        EdgeError,
        EngineError,
        ExportError,
        InputError,
        StateError,
        TokenizerError,
    )
    from edge.runtime.model import Model, load
    from edge.runtime.sampling import SamplingParams
    from edge.runtime.session import Session

_HOMES = {
    "ModelConfig": "edge.config",
    "Model": "edge.runtime.model",
    "SamplingParams": "edge.runtime.sampling",
    "Session": "edge.runtime.session",
    "load": "edge.runtime.model",
} | dict.fromkeys(
    (
        "BundleError",
        "CheckpointError",
        "ContextFullError",
        "EdgeError",
        "EngineError",
        "ExportError",
        "InputError",
        "StateError",
        "TokenizerError",
    ),
    "edge.errors",
)

__all__ = [
    "BundleError",
    "CheckpointError",
    "ContextFullError",
    "EdgeError",
    "EngineError",
    "ExportError",
    "InputError",
    "Model",
    "ModelConfig",
    "SamplingParams",
    "Session",
    "StateError",
    "TokenizerError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
