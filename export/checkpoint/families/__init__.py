"""One reader per model family. A new family is a new file and a line in `FAMILIES`."""

from __future__ import annotations

from edge.export.checkpoint.families import (
    bamba,
    gpt_neox,
    llama,
    mamba,
    mamba2,
    mambabyte,
    mistral,
)
from edge.export.checkpoint.families.base import Family

# In order: the first that claims a checkpoint reads it. MambaByte's state-spaces layout differs
# from Mamba's by its vocabulary alone, so it goes before.
FAMILIES: tuple[Family, ...] = (
    mambabyte.FAMILY,
    mamba.FAMILY,
    mamba2.FAMILY,
    bamba.FAMILY,
    gpt_neox.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
)

__all__ = ["FAMILIES", "Family"]
