"""Each mixer's torch module, graph and rounding: a file a kind, found by its name."""

from __future__ import annotations

import importlib
from typing import Any

from edge.export.mixers.base import MixerExport
from edge.mixers.base import MixerConfig


def mixer_of(config: MixerConfig) -> MixerExport[Any]:
    """What `edge.export.mixers.<kind>` has under the name EXPORT, for one layer's config."""
    module = importlib.import_module(f"{__name__}.{config.kind}")
    found: MixerExport[Any] = module.EXPORT(config)
    return found
