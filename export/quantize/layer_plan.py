"""One layer's plan: its recipe's table, with the scales that calibration gives."""

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
    """What a table says of a weight."""
    how = table.get(name, default)
    if not isinstance(how, Storage):
        raise TypeError(f"{name} is a weight, the recipe says {how}")
    return how


def activation(table: Table, name: str) -> Activation | None:
    """What a table says of an activation; None is floating."""
    how = table.get(name)
    if isinstance(how, Storage):
        raise TypeError(f"{name} is an activation, the recipe says {how}")
    return how


@dataclass(frozen=True)
class Matrix:
    """A product of a layer, as the graph has it.

    Attributes:
        rows, columns: N and K.
        reads: the value of the fp32 graph that it multiplies, or a part of it.
        listed, reads_listed: what recipes call the matrix and that value, where the layer has a
            rarer form and other names.
        experts: how many of it there are, stacked; 0 is a single one, of no expert.
        routed: the value that says which expert each slot of `reads` goes to, where it has slots.
    """

    rows: int
    columns: int
    reads: str
    listed: str = ""
    reads_listed: str = ""
    experts: int = 0
    routed: str = ""


def stored_as(table: Table, name: str, matrix: Matrix) -> tuple[Storage, Activation | None]:
    """How a table keeps a matrix, and how its product rounds what it reads."""
    wanted = storage(table, matrix.listed or name, FLOATING)
    kept = fitting(wanted, matrix.columns)
    how = activation(table, matrix.reads_listed or matrix.reads)
    if how is None or wanted.bits > 8:
        return kept, None
    if kept.bits > 8:
        kept = INT8_ROWS if matrix.experts else INT8
    return kept, how


@dataclass
class LayerPlanner:
    """Plans one layer.

    Attributes:
        prefix: `layers.3`.
        weight: name of a weight of the graph → fp32 array.
        state: what ssm_state is to be kept in.
        cache: what attention is to keep keys and values in.
        known: matrix → how its input is rounded, where a site has said it already.
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
        """Every product, after the sites."""
        return {name: self._product(name) for name in self.matrices}

    def _product(self, name: str) -> Product:
        matrix = self.matrices[name]
        kept, how = stored_as(self.table, name, matrix)
        if how is None:
            return Product(kept)
        if name in self.known:
            return Product(kept, self.known[name])
        if isinstance(how, Dynamic):
            if kept.block is not None and not matrix.experts:
                raise TypeError(f"{name}: no op multiplies blocks by what has a scale a token")
            return Product(kept, Rounding(None, threshold=how.outliers))
        seen = self.sites.seen(self.value(matrix.reads), how)
        rounding, outliers = self.sites.rounding(seen, how, lambda: self.column_absmax(name))
        return Product(kept, rounding, outliers)

    def column_absmax(self, matrix: str) -> F32:
        """The matrix's largest magnitude in each column, [K]."""
        largest: F32 = np.abs(self.weight(f"{matrix}.weight")).max(axis=0).astype(np.float32)
        return largest

    def value(self, name: str) -> str:
        """The name of a value of the layer in the whole graph."""
        return f"{self.prefix}.{name}"

    def site(
        self, name: str, matrix: str = "", grouped: Callable[[SeenRange], F32] | None = None
    ) -> Rounding | None:
        """How a value of the table is rounded as a whole; `matrix` also reads it.

        `grouped` finds scales a channel for a recipe that wants groups.
        """
        how = activation(self.table, name)
        if how is None:
            return None
        if isinstance(how, Dynamic):
            return Rounding(None)
        if not matrix:  # whose columns smoothing would look at
            how = replace(how, smooth=None)
        seen = self.sites.seen(self.value(name), how)
        if how.groups and grouped is not None:
            return self.sites.given(seen, how, grouped(seen))
        rounding, _ = self.sites.rounding(seen, how, lambda: self.column_absmax(matrix))
        if matrix:
            self.known[matrix] = rounding
        return rounding
