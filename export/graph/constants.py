"""The small weights of a Mamba layer: convolution, A_log, D and dt_bias, floating or in int8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge.config import Mamba1Config, Mamba2Config
from edge.export.graph.builder import F32
from edge.export.graph.place import Place, joined
from edge.export.graph.products import scale_of
from edge.export.quantize.int8 import I8, dequantize_int8, quantize_int8

Change = Callable[[F32], F32]
# What plans call them, where that is not their name.
_OF = {"conv1d.weight": "conv1d", "conv1d.bias": "conv1d", "dt_proj.bias": "dt_bias"}


def conv_parts(layer: Mamba1Config | Mamba2Config) -> tuple[int, ...]:
    """Channels of the tensors that are convolved together: x, and Mamba-2's B and C.

    Each has scales of its own (Quamba2's code, and what one scale a tensor means for a join).
    """
    if isinstance(layer, Mamba1Config):
        return (layer.d_inner,)
    shares = layer.n_groups * layer.d_state
    return (layer.d_ssm, shares, shares)


def constant(
    at: Place,
    name: str,
    change: Change | None = None,
    parts: Sequence[int] = (),
    after: Change | None = None,
) -> str:
    """Store a small weight as fp32, changed in order; on the grid of int8 where the plan says so.

    `parts` are as in `constant_int8`; `after` is applied to the rounded values.
    """

    def make(array: F32) -> F32:
        array = array if change is None else change(array)
        if at.plan.scan is not None and _OF.get(name, name) in at.plan.scan.constants:
            quants, scale = _round(array, parts)
            array = dequantize_int8(quants, scale)
        return array if after is None else after(array)

    return at.g.weight(at.named(name), make)


def constant_int8(
    at: Place, name: str, change: Change | None = None, parts: Sequence[int] = ()
) -> list[str]:
    """Store a small weight in int8: [its name, its scale's], the scale [1] or [C].

    `parts` are the widths of what lies side by side on the last axis, each with its own scale.
    """
    full = at.named(name)
    array = at.g.tensor(full)
    return rounded_constant(at, full, array if change is None else change(array), parts)


def rounded_constant(at: Place, name: str, array: F32, parts: Sequence[int] = ()) -> list[str]:
    quants, scale = _round(array, parts)
    return [at.g.raw(name, quants), scale_of(at.g, f"{name}.scale", scale)]


def _round(array: F32, parts: Sequence[int]) -> tuple[I8, F32]:
    if len(parts) < 2:
        return quantize_int8(array)
    pieces = np.split(array, np.cumsum(parts)[:-1], axis=-1)
    rounded = [quantize_int8(piece) for piece in pieces]
    scale = joined(*((scale, width) for (_, scale), width in zip(rounded, parts, strict=True)))
    return np.concatenate([quants for quants, _ in rounded], -1), scale
