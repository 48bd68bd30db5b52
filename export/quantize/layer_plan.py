"""Plan one layer: its recipe's table, with the scales found by calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from edge.export.quantize.plan import F32 as FLOATING
from edge.export.quantize.plan import (
    INT8,
    INT8_ROWS,
    Activation,
    CacheType,
    Dynamic,
    Product,
    Rounding,
    StateType,
    Storage,
    Table,
    fitting,
)
from edge.export.quantize.sites import SeenRange, Sites

F32 = NDArray[np.float32]


def storage(table: Table, name: str, default: Storage) -> Storage:
    """Return how a table stores a weight, or `default` if it does not list the weight."""
    how = table.get(name, default)
    if not isinstance(how, Storage):
        raise TypeError(f"{name} is a weight, but the recipe says {how}")
    return how


def activation(table: Table, name: str) -> Activation | None:
    """Return how a table rounds an activation; None leaves it floating."""
    how = table.get(name)
    if isinstance(how, Storage):
        raise TypeError(f"{name} is an activation, but the recipe says {how}")
    return how


@dataclass(frozen=True)
class Matrix:
    """Matrix of a layer's product, as the graph has it.

    Attributes:
        rows, columns: N and K.
        reads: value of the fp32 graph that the product multiplies, in whole or in part.
        listed, reads_listed: names of the matrix and of that value in recipes, where a rarer form
            of the layer uses other names.
        experts: number of stacked experts; 0 for a single matrix outside experts.
        routed: value that says which expert each slot of `reads` goes to, if it has slots.
    """

    rows: int
    columns: int
    reads: str
    listed: str = ""
    reads_listed: str = ""
    experts: int = 0
    routed: str = ""


def stored_as(table: Table, name: str, matrix: Matrix) -> tuple[Storage, Activation | None]:
    """Return how a table stores a matrix, and how its product rounds its input."""
    requested = storage(table, matrix.listed or name, FLOATING)
    stored = fitting(requested, matrix.columns)
    how = activation(table, matrix.reads_listed or matrix.reads)
    if how is None or requested.bits > 8:
        return stored, None
    if stored.bits > 8:
        stored = INT8_ROWS if matrix.experts else INT8
    return stored, how


@dataclass
class LayerPlanner:
    """Plans one layer.

    Attributes:
        prefix: the layer's name, such as `layers.3`.
        weight: name of a weight of the graph → fp32 array.
        state: requested type of ssm_state.
        cache: requested type of attention's keys and values.
        known: matrix → rounding of its input, where a site has already fixed it.
    """

    prefix: str
    matrices: Mapping[str, Matrix]
    table: Table
    sites: Sites
    weight: Callable[[str], F32]
    state: StateType = "fp32"
    cache: CacheType = "fp32"
    known: dict[str, Rounding] = field(default_factory=dict)

    def products(self) -> dict[str, Product]:
        """Plan every product. Call it after the sites."""
        return {name: self._product(name) for name in self.matrices}

    def _product(self, name: str) -> Product:
        matrix = self.matrices[name]
        stored, how = stored_as(self.table, name, matrix)
        if how is None:
            return Product(stored)
        if name in self.known:
            return Product(stored, self.known[name])
        if isinstance(how, Dynamic):
            if stored.block is not None and not matrix.experts:
                raise TypeError(f"{name}: no op multiplies blocks by an input with a scale a token")
            return Product(stored, Rounding(None, threshold=how.outliers))
        seen = self.sites.seen(self.value(matrix.reads), how)
        rounding, outliers = self.sites.rounding(seen, how, lambda: self.column_absmax(name))
        return Product(stored, rounding, outliers)

    def column_absmax(self, matrix: str) -> F32:
        """Return the largest magnitude in each column of a matrix, [K]."""
        largest: F32 = np.abs(self.weight(f"{matrix}.weight")).max(axis=0).astype(np.float32)
        return largest

    def value(self, name: str) -> str:
        """Return the full name in the graph of a value of the layer."""
        return f"{self.prefix}.{name}"

    def site(
        self, name: str, matrix: str = "", grouped: Callable[[SeenRange], F32] | None = None
    ) -> Rounding | None:
        """Return how a listed value is rounded as a whole; `matrix` is a product that reads it.

        `grouped` finds per-channel scales for recipes with groups.
        """
        how = activation(self.table, name)
        if how is None:
            return None
        if isinstance(how, Dynamic):
            return Rounding(None)
        if not matrix:  # smoothing needs the columns of a matrix
            how = replace(how, smooth=None)
        seen = self.sites.seen(self.value(name), how)
        if how.groups and grouped is not None:
            return self.sites.given(seen, how, grouped(seen))
        rounding, _ = self.sites.rounding(seen, how, lambda: self.column_absmax(matrix))
        if matrix:
            self.known[matrix] = rounding
        return rounding
