"""edge: quantized Mamba, Mamba-2 and hybrid language models on small NVIDIA devices.

Importing this package loads nothing heavy: public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edge.config import ModelConfig as ModelConfig
    from edge.errors import BundleError as BundleError
    from edge.errors import CheckpointError as CheckpointError
    from edge.errors import ContextFullError as ContextFullError
    from edge.errors import EdgeError as EdgeError
    from edge.errors import EngineError as EngineError
    from edge.errors import ExportError as ExportError
    from edge.errors import InputError as InputError
    from edge.errors import PullError as PullError
    from edge.errors import StateError as StateError
    from edge.errors import TokenizerError as TokenizerError
    from edge.runtime.model import Model as Model
    from edge.runtime.model import load as load
    from edge.runtime.parameters import SamplingParams as SamplingParams
    from edge.runtime.session import Session as Session

# public names, by the module they are imported from
_PUBLIC = {
    "edge.config": "ModelConfig",
    "edge.errors": "BundleError CheckpointError ContextFullError EdgeError EngineError ExportError "
    "InputError PullError StateError TokenizerError",
    "edge.runtime.model": "Model load",
    "edge.runtime.parameters": "SamplingParams",
    "edge.runtime.session": "Session",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'edge' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
