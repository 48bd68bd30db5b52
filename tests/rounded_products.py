"""References of products that round x as their statements let an implementation do.

To follow an engine that rounds so, and to measure how far two engines that both keep the statements
may be apart on a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge.export.graph import GRAPH_FILE
from edge.plugins.catalogue import OPS
from edge.plugins.quantize.reference import fake_quantize_rows
from edge.plugins.reference.graph import ReferenceGraph, by_name

# products of packed weights, and of floating ones
BITS = ("LinearBits", "LinearBitsMinimum", "ExpertLinearBits", "ExpertLinearBitsMinimum")
FLOATING = ("Linear", "ExpertLinear")
Round = Callable[[Tensor, Mapping[str, Any]], Tensor]


def to_half(x: Tensor, _: Mapping[str, Any]) -> Tensor:
    """Round x to fp16 and back; what is larger becomes fp16's largest number."""
    return x.clamp(-65504, 65504).half().float()


def to_int8(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Round x to int8 in the blocks of columns that share a scale of the weight."""
    return fake_quantize_rows(x.unflatten(-1, (-1, given["block_size"]))).flatten(-2)


def references(bits: Round, floating: Round | None = None) -> dict[str, Callable[..., Any]]:
    """Return ops for `ReferenceGraph`: x is rounded by `bits` for packed weights, and by `floating`
    for fp16 ones.
    """
    made = {name: _rounding(name, bits) for name in BITS}
    if floating is not None:
        made |= {name: _rounding(name, floating) for name in FLOATING}
    return made


def open_rounding(folder: Path, ops: Mapping[str, Callable[..., Any]]) -> ReferenceGraph:
    """Open the graph of a bundle with such references."""
    return ReferenceGraph((folder / GRAPH_FILE).read_bytes(), folder, ops=ops)


def _rounding(op: str, rounded: Round) -> Callable[..., Any]:
    names = [value.name for value in OPS[op].inputs]

    def product(**given: Any) -> Tensor:
        inputs = [given.pop(name) for name in names]
        if op not in FLOATING or inputs[-1].dtype == torch.float16:
            inputs[0] = rounded(inputs[0], given)
        (y,) = by_name(op, given)(*inputs)
        return y

    return product
