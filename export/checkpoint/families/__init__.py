"""The readers of model families: one file each, discovered in this folder."""

from __future__ import annotations

import importlib
import pkgutil

from edge.export.checkpoint.family import Family


def every() -> tuple[Family, ...]:
    """Return the readers, in the order in which a checkpoint is offered to them."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    ]
    readers: list[Family] = [module.FAMILY for module in modules]
    return tuple(sorted(readers, key=lambda family: (not family.first, family.name)))
