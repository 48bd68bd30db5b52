"""Each mixer's torch module, graph and rounding: one file per kind, found by its name."""

from __future__ import annotations

import importlib
from typing import Any

from edge.export.mixers.base import MixerExport
from edge.mixers.base import MixerConfig


def mixer_of(config: MixerConfig) -> MixerExport[Any]:
    """Return the `EXPORT` of `edge.export.mixers.<kind>` for one layer's config."""
    module = importlib.import_module(f"{__name__}.{config.kind}")
    export: MixerExport[Any] = module.EXPORT(config)
    return export
