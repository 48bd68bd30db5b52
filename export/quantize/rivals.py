"""What Quamba is compared with, in its own tables' words (Quamba, section 6 and appendix H).

The head reads `final` neither smoothed nor rotated: its matrix may be the embedding's table too.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge.export.quantize.how import Activation, Dynamic, Static, Table
from edge.export.quantize.plan import INT8
from edge.export.quantize.quamba import ABSMAX, ENDS, HADAMARD, attention, mamba1, mamba2, mlp
from edge.export.quantize.recipes import LayerKind, Recipe

# SmoothQuant: a divisor a channel, α = 0.5
SMOOTH = Static(smooth=0.5)


def _dynamic(table: Table) -> Table:
    return {name: Dynamic() if isinstance(how, Activation) else how for name, how in table.items()}


def _recipe(name: str, layers: Mapping[LayerKind, Table], activations: str, method: str) -> Recipe:
    details = {"weights": "int8", "activations": f"int8, {activations}", "method": method}
    return Recipe(name, 8, None, ENDS, layers, details)


def _same(reads: Static, x: Static, y: Static) -> dict[LayerKind, Table]:
    """One treatment of everything that a product reads."""
    return {
        "mamba1": mamba1(x=x, y=y, normed=reads),
        "mamba2": mamba2(x=x, y=y, normed=reads),
        "attention": attention(reads, INT8),
        "mlp": mlp(reads, INT8),
    }


_PLAIN = _same(ABSMAX, x=ABSMAX, y=ABSMAX)

STATIC = _recipe("w8a8-static", _PLAIN, "static", "min-max")

DYNAMIC = Recipe(
    "w8a8-dynamic",
    8,
    None,
    _dynamic(ENDS),
    {kind: _dynamic(table) for kind, table in _PLAIN.items()},
    {"weights": "int8", "activations": "int8, a scale a token", "method": "min-max"},
)

# Smoothed wherever a product reads; Mamba-2's x is read by the scan alone.
SMOOTHQUANT = _recipe(
    "w8a8-smoothquant",
    {
        "mamba1": mamba1(x=SMOOTH, y=SMOOTH, normed=SMOOTH, low=SMOOTH),
        "mamba2": mamba2(x=ABSMAX, y=SMOOTH, normed=SMOOTH),
        "attention": attention(SMOOTH, INT8),
        "mlp": mlp(SMOOTH, INT8),
    },
    "static",
    "SmoothQuant, α = 0.5",
)

# QuaRot on Mamba: every input of a product is rotated online, the norms' too, which QuaRot folds
# into the residual stream; x is rotated back before the scan.
HADAMARD_EVERYWHERE = _recipe(
    "w8a8-hadamard",
    _same(HADAMARD, x=HADAMARD, y=HADAMARD),
    "static",
    "QuaRot: rotated online",
)

ALL = (STATIC, DYNAMIC, SMOOTHQUANT, HADAMARD_EVERYWHERE)
