"""Standard ONNX ops as exported graphs use them: inputs in order, attributes by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from onnx import TensorProto
from torch import Tensor

_DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}

add, sub, mul = torch.add, torch.sub, torch.mul
cos, sin = torch.cos, torch.sin
equal, and_, not_ = torch.eq, torch.logical_and, torch.logical_not
where, greater_or_equal = torch.where, torch.ge


def _sizes(values: Tensor) -> list[int]:
    return [int(value) for value in values.tolist()]


def split(x: Tensor, sizes: Tensor, axis: int = 0, **_: Any) -> tuple[Tensor, ...]:
    return tuple(x.split(_sizes(sizes), dim=axis))


def concat(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, dim=axis)


def gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    return x[(slice(None),) * (axis % x.dim()) + (indices,)]


def transpose(x: Tensor, perm: Sequence[int]) -> Tensor:
    return x.permute(list(perm))


def reshape(x: Tensor, shape: Tensor, **_: Any) -> Tensor:
    # 0 keeps the size of x's own axis
    return x.reshape([size or x.shape[i] for i, size in enumerate(_sizes(shape))])


def shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(_sizes(axes))


def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in _sizes(axes)):
        x = x.unsqueeze(axis)
    return x


def range_(start: Tensor, end: Tensor, step: Tensor) -> Tensor:
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def slice_(
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    count = starts.numel()
    where = range(count) if axes is None else _sizes(axes)
    strides: Sequence[int] = [1] * count if steps is None else _sizes(steps)
    for start, end, axis, step in zip(_sizes(starts), _sizes(ends), where, strides, strict=True):
        # Python's rules for out-of-range and negative bounds are ONNX's; torch has no negative
        # steps.
        rows = range(x.shape[axis])[slice(start, end, step)]
        x = x.index_select(axis, torch.tensor(list(rows), dtype=torch.int64))
    return x


def cast(x: Tensor, to: int, **_: Any) -> Tensor:
    return x.to(_DTYPES[to])


def expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, _sizes(shape)))


def constant_of_shape(shape: Tensor, **_: Any) -> Tensor:
    return torch.zeros(_sizes(shape))
