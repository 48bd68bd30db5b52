"""The reader of each model family: a file here, found by being here."""

from __future__ import annotations

import importlib
import pkgutil

from edge.export.checkpoint.family import Family


def every() -> tuple[Family, ...]:
    """The readers, in the order in which they are asked whether a checkpoint is theirs."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    ]
    found: list[Family] = [module.FAMILY for module in modules]
    return tuple(sorted(found, key=lambda family: (not family.first, family.name)))
