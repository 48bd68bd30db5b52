"""The registry of recipes, in which `--quant NAME` is looked up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from edge import mixers
from edge.errors import ExportError
from edge.export.quantize.plan import CacheType, Static, Table

KINDS = tuple(map(mixers.kind_of, mixers.every()))


@dataclass(frozen=True)
class Recipe:
    """A named set of tables, one for each kind of layer and one for the two ends of a model.

    Attributes:
        bits, block_size: bits and block of most weights, for the manifest.
        ends: table for `embedding`, `final` (the input of the head) and `head`.
        layers: kind of layer → table.
        details: facts for the manifest that are needed to compare two bundles.
        kv_cache: type of attention's keys and values.
    """

    name: str
    bits: Literal[4, 8, 16, 32]
    block_size: int | None
    ends: Table
    layers: Mapping[str, Table]
    details: Mapping[str, str] = field(default_factory=dict)
    kv_cache: CacheType = "fp16"

    @property
    def calibrated(self) -> bool:
        """Whether scales must be calibrated on text."""
        tables = (self.ends, *self.layers.values())
        return any(isinstance(how, Static) for table in tables for how in table.values())


_RECIPES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> None:
    """Make a recipe available under its name. Raises ValueError when the name is taken."""
    if recipe.name in _RECIPES:
        raise ValueError(f"recipe {recipe.name!r} is already registered")
    _RECIPES[recipe.name] = recipe


def recipe(name: str, field: str = "quant") -> Recipe:
    """Return the recipe called `name`. Raises ExportError listing the known ones if unknown."""
    found = _RECIPES.get(name)
    if found is None:
        similar = get_close_matches(name, list(names()), 1)
        suggestion = f"did you mean {similar[0]!r}? " if similar else ""
        raise ExportError(
            f"no quantization recipe is called {name!r}",
            field=field,
            remedy=f"{suggestion}choose one of: {', '.join(names())}",
        )
    return found


def names() -> Iterable[str]:
    """Return the names of all recipes, in the order of registration."""
    return tuple(_RECIPES)
