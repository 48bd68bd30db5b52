"""ONNX's own ops that the exporter's graphs hold between `edge` nodes, in torch.

An adapter takes a node's attributes and its inputs in order, and gives its outputs as a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

Attributes = Mapping[str, Any]
Outputs = tuple[Tensor, ...]
Adapter = Callable[..., Outputs]

_DTYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}


def _sizes(values: Tensor) -> list[int]:
    return [int(value) for value in values.tolist()]


def _split(a: Attributes, x: Tensor, sizes: Tensor) -> Outputs:
    return tuple(x.split(_sizes(sizes), dim=a.get("axis", 0)))


def _concat(a: Attributes, *parts: Tensor) -> Outputs:
    return (torch.cat(parts, dim=a["axis"]),)


def _gather(a: Attributes, x: Tensor, indices: Tensor) -> Outputs:
    return (x[(slice(None),) * (a.get("axis", 0) % x.dim()) + (indices,)],)


def _transpose(a: Attributes, x: Tensor) -> Outputs:
    return (x.permute(a["perm"]),)


def _reshape(a: Attributes, x: Tensor, shape: Tensor) -> Outputs:
    # 0 keeps the size of x's own axis
    return (x.reshape([size or x.shape[i] for i, size in enumerate(_sizes(shape))]),)


def _shape(a: Attributes, x: Tensor) -> Outputs:
    return (torch.tensor(x.shape[a.get("start", 0) : a.get("end", x.dim())], dtype=torch.int64),)


def _squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Outputs:
    return (x.squeeze() if axes is None else x.squeeze(_sizes(axes)),)


def _unsqueeze(a: Attributes, x: Tensor, axes: Tensor) -> Outputs:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in _sizes(axes)):
        x = x.unsqueeze(axis)
    return (x,)


def _range(a: Attributes, start: Tensor, end: Tensor, step: Tensor) -> Outputs:
    return (torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype),)


def _slice(
    a: Attributes,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Outputs:
    count = starts.numel()
    where = range(count) if axes is None else _sizes(axes)
    strides: Sequence[int] = [1] * count if steps is None else _sizes(steps)
    for start, end, axis, step in zip(_sizes(starts), _sizes(ends), where, strides, strict=True):
        # Python's own rules for out-of-range and negative bounds are ONNX's; torch knows no
        # negative step.
        rows = range(x.shape[axis])[start:end:step]
        x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64))
    return (x,)


def _cast(a: Attributes, x: Tensor) -> Outputs:
    return (x.to(_DTYPES[a["to"]]),)


def _expand(a: Attributes, x: Tensor, shape: Tensor) -> Outputs:
    return (x.expand(torch.broadcast_shapes(x.shape, _sizes(shape))),)


def _constant_of_shape(a: Attributes, shape: Tensor) -> Outputs:
    return (torch.zeros(_sizes(shape)),)


def _elementwise(function: Callable[..., Tensor]) -> Adapter:
    def run(a: Attributes, *inputs: Tensor) -> Outputs:
        return (function(*inputs),)

    return run


STANDARD: dict[str, Adapter] = {
    "Split": _split,
    "Concat": _concat,
    "Gather": _gather,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Shape": _shape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Range": _range,
    "Slice": _slice,
    "Cast": _cast,
    "Expand": _expand,
    "ConstantOfShape": _constant_of_shape,
    "Add": _elementwise(torch.add),
    "Sub": _elementwise(torch.sub),
    "Mul": _elementwise(torch.mul),
    "Cos": _elementwise(torch.cos),
    "Sin": _elementwise(torch.sin),
    "Equal": _elementwise(torch.eq),
    "And": _elementwise(torch.logical_and),
    "Not": _elementwise(torch.logical_not),
}
