"""The mixers that a model's layers can be: one module each, found by listing this folder."""

from __future__ import annotations

import importlib
import pkgutil

from edge.mixers.base import MixerConfig


def every() -> tuple[type[MixerConfig], ...]:
    """Return the config class of each kind of mixer: recurrent ones first, then by name."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return tuple(sorted(MixerConfig.__subclasses__(), key=lambda m: (not m.recurrent, kind_of(m))))


def kind_of(mixer: type[MixerConfig]) -> str:
    """Return the `kind` that names a mixer in JSON."""
    return str(mixer.model_fields["kind"].default)
