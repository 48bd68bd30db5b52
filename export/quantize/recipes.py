"""Recipes: which weight is stored how. `--quant NAME` looks one up here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from edge.errors import ExportError

# Blocks tried, largest first, when a recipe's own does not divide a weight's columns.
_BLOCKS = (128, 64, 32)


@dataclass(frozen=True)
class Storage:
    """How a linear weight is kept: 32 or 16 bits floating, or 8 or 4 bits in blocks of columns."""

    bits: int
    block: int | None = None

    @property
    def quantized(self) -> bool:
        return self.block is not None


F32 = Storage(32)
F16 = Storage(16)

# (tensor name, rows, columns) → Storage. Only embedding, head and linear weights are asked about;
# norms, convolutions, biases, A, D and dt_bias stay fp32: they are small and steer the recurrence.
Rule = Callable[[str, int, int], Storage]


@dataclass(frozen=True)
class Recipe:
    """A named way to store a model's weights.

    Attributes:
        bits: of most weights, for the manifest.
        block_size: columns that share a scale, or None.
        details: for the manifest; what a reader must know to compare two bundles.
    """

    name: str
    bits: Literal[4, 8, 16, 32]
    block_size: int | None
    storage: Rule
    details: dict[str, str]


def _block(columns: int, largest: int) -> int | None:
    return next((b for b in _BLOCKS if b <= largest and columns % b == 0), None)


def _weight_only(bits: int, block: int) -> Rule:
    """Blocks for every linear weight but `dt_proj`; `x_proj` never below 8 bits.

    Both feed Δ, B and C, the quantities an SSM is most sensitive to (Quamba, arXiv 2410.13229,
    section 4.1), and together are 4 % of a Mamba-1 layer.
    """

    def storage(name: str, rows: int, columns: int) -> Storage:
        if ".dt_proj." in name:
            return F32
        wanted = Storage(8, 128) if ".x_proj." in name and bits < 8 else Storage(bits, block)
        assert wanted.block is not None
        fitting = _block(columns, wanted.block)
        return F32 if fitting is None else Storage(wanted.bits, fitting)

    return storage


def _half(name: str, rows: int, columns: int) -> Storage:
    return F32 if ".dt_proj." in name else F16


_RECIPES: dict[str, Recipe] = {}


def register(recipe: Recipe) -> None:
    """Make a recipe available under its name. Raises ValueError when the name is taken."""
    if recipe.name in _RECIPES:
        raise ValueError(f"recipe {recipe.name!r} is already registered")
    _RECIPES[recipe.name] = recipe


def recipe(name: str) -> Recipe:
    """The recipe called `name`. Raises ExportError naming those there are."""
    found = _RECIPES.get(name)
    if found is None:
        raise ExportError(
            f"no quantization recipe is called {name!r}",
            field="quant",
            remedy=f"choose one of: {', '.join(names())}",
        )
    return found


def names() -> Iterable[str]:
    """Every recipe's name, in the order they were registered."""
    return tuple(_RECIPES)


register(Recipe("fp32", 32, None, lambda name, rows, columns: F32, {}))
register(Recipe("fp16", 16, None, _half, {"activations": "fp32"}))
register(
    Recipe("w8", 8, 128, _weight_only(8, 128), {"weights": "int8, absmax", "activations": "fp32"})
)
register(
    Recipe(
        "w4",
        4,
        32,
        _weight_only(4, 32),
        {"weights": "int4, least squares; x_proj int8", "activations": "fp32"},
    )
)
