"""Device ops of the embedding, where packed bytes are i8."""

from __future__ import annotations

from collections.abc import Iterator

from edge.ops import Op
from edge.plugins.catalogue import ops_in
from edge.plugins.device.rules import stateless
from edge.plugins.device.text import CONSTANTS
from edge.plugins.linear.device import QUANTS, SIGNED


def statements() -> Iterator[Op]:
    yield from (stateless(op, views=False) for op in ops_in("embedding"))


def embed_bits(bits: int) -> str:
    return (
        CONSTANTS
        + SIGNED
        + "    rows = Gather<axis=0>(signed, tokens)\n"
        + QUANTS[bits] % {"bytes": "rows"}
        + """
    row_scales = Gather<axis=0>(scales, tokens)
    scale = Unsqueeze(row_scales, end)
    blocks = Mul(centred, scale)
    size = Shape(tokens)
    shape = Concat<axis=0>(size, end)
    y = Reshape(blocks, shape)
"""
    )
