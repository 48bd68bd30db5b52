"""One reader per model family. A new family is a new file and a line in `FAMILIES`."""

from __future__ import annotations

from edge.export.checkpoint.families import bamba, mamba, mamba2, mambabyte
from edge.export.checkpoint.families.base import Family

# In order: the first that claims a checkpoint reads it. MambaByte's state-spaces layout differs
# from Mamba's by its vocabulary alone, so it goes before.
FAMILIES: tuple[Family, ...] = (
    mambabyte.FAMILY,
    mamba.FAMILY,
    mamba2.FAMILY,
    bamba.FAMILY,
)

__all__ = ["FAMILIES", "Family"]
