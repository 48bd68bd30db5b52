"""What several checks of `edge doctor` do: a step of a model, on one engine or beside ONNX Runtime.

The errors of engines are findings: nothing is caught here.
"""

from __future__ import annotations

import importlib.metadata
from importlib.util import find_spec

import numpy as np


def step(bundle: str, engine: str, provider: str | None = None) -> np.ndarray:
    """The logits after one token. Raises EdgeError, ValueError: they are not finite."""
    from edge.runtime.model import load

    with load(bundle, engine=engine, provider=provider) as model:
        state = model.engine.new_state(window=1, capacity=16)
        logits = model.engine.run(np.array([[1]]), state)[0, -1].copy()
    if not np.isfinite(logits).all():
        raise ValueError("a step gave logits that are not finite")
    out: np.ndarray = logits
    return out


def beside(bundle: str, engine: str, provider: str | None = None) -> tuple[str, str, str | None]:
    """A step on a GPU, beside the same step on the CPU: status, detail, remedy."""
    here = step(bundle, engine, provider)
    if find_spec("onnxruntime") is None:
        return "ok", f"a step of {bundle}; no ONNX Runtime is installed to compare it with", None
    there = step(bundle, "ort", "cpu")
    apart = float(np.abs(here - there).max() / max(np.abs(there).max(), 1e-9))
    detail = f"a step of {bundle}, at most {apart:.1e} of the largest logit from ONNX Runtime's"
    if here.argmax() != there.argmax():
        return "broken", f"{detail}: another token", "report it, with edge doctor --json"
    return "ok", detail, None


def version(package: str) -> str | None:
    """Of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
