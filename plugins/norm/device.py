"""Device ops of the norms, also of the wanted rows only."""

from __future__ import annotations

from collections.abc import Iterator

from edge.ops import Op
from edge.plugins.catalogue import ops_in
from edge.plugins.device.rules import of_rows, stateless
from edge.plugins.device.text import on_rows
from edge.plugins.norm.statement import ADD_LAYER_NORM, ADD_RMS_NORM, ADD_RMS_NORM_QUANTIZE


def statements() -> Iterator[Op]:
    """Yield norms of whole rows, and those that pick the wanted rows."""
    yield from (stateless(op, views=False) for op in ops_in("norm"))
    yield from map(of_rows, (ADD_RMS_NORM, ADD_LAYER_NORM, ADD_RMS_NORM_QUANTIZE))


ADD_RMS_NORM_ROWS = on_rows(ADD_RMS_NORM)
ADD_LAYER_NORM_ROWS = on_rows(ADD_LAYER_NORM)
ADD_RMS_NORM_QUANTIZE_ROWS = on_rows(ADD_RMS_NORM_QUANTIZE)
