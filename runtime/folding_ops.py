"""Rules that bound the results of standard ops on constants: sizes, shapes and small values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.runtime.graph import integers
from edge.runtime.graph_format import Message

SMALL = 64  # maximum number of elements of a constant whose values are tracked
RANK = 16  # maximum rank of any value

Numbers = NDArray[np.int64]


class Unbounded(Exception):
    """The result of a node cannot be bounded."""


@dataclass(frozen=True)
class KnownConstant:
    """What is known about a constant.

    Attributes:
        count: maximum number of elements.
        shape: maximum size of each axis; None is unknown.
        exact: whether `shape` is exact and not only a bound.
        numbers: the values, if they are known and at most `SMALL` integers.
    """

    count: int
    shape: tuple[int, ...] | None = None
    exact: bool = True
    numbers: Numbers | None = None

    @staticmethod
    def of(numbers: Any) -> KnownConstant:
        array = np.asarray(numbers, np.int64)
        return KnownConstant(array.size, array.shape, True, array if array.size <= SMALL else None)

    @staticmethod
    def shaped(shape: Sequence[int], exact: bool = True) -> KnownConstant:
        return KnownConstant(math.prod(shape), tuple(shape), exact)

    @property
    def key(self) -> tuple[Any, ...]:
        numbers = None if self.numbers is None else self.numbers.tobytes()
        return self.count, self.shape, self.exact, numbers

    def known(self) -> Numbers:
        if self.numbers is None:
            raise Unbounded
        return self.numbers


Own = Mapping[bytes, Message]
Rule = Callable[[list[KnownConstant], Own], list[KnownConstant]]


def _int_attribute(attributes: Own, name: bytes, default: int) -> int:
    return integers([attributes[name]["i"]])[0] if "i" in attributes.get(name, {}) else default


def _ints_attribute(attributes: Own, name: bytes) -> list[int] | None:
    return integers(attributes[name]["ints"]) if "ints" in attributes.get(name, {}) else None


def _same_shape(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    first = inputs[0]
    return [KnownConstant(first.count, first.shape, first.exact)]


def _identity(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    return inputs[:1]


def _fits(numbers: Numbers) -> bool:
    """Return whether all numbers fit into 32 bits."""
    return bool(np.all(abs(numbers) < 1 << 31))


def _cast(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    numbers, to = inputs[0].numbers, _int_attribute(attributes, b"to", 0)
    fits = to == 7 or (to == 6 and numbers is not None and _fits(numbers))
    return inputs[:1] if fits else _same_shape(inputs, attributes)


def _broadcast_result(inputs: list[KnownConstant]) -> KnownConstant:
    """Return the broadcast shape of an elementwise op."""
    if any(constant.shape is None for constant in inputs):
        return KnownConstant(math.prod(max(1, constant.count) for constant in inputs))
    shapes = [constant.shape or () for constant in inputs]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    joined = [0 if 0 in axis else max(axis) for axis in zip(*padded, strict=True)]
    exact = all(constant.exact for constant in inputs)
    # with inexact shapes a 0 is only a bound: the other operand's axis may decide
    joined = joined if exact else [max(axis) for axis in zip(*padded, strict=True)]
    return KnownConstant.shaped(joined, exact)


def _broadcast(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    return [_broadcast_result(inputs)]


def _arithmetic(compute: Callable[[Numbers, Numbers], Any]) -> Rule:
    def rule(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
        result = _broadcast_result(inputs)
        if len(inputs) == 2 and result.count <= SMALL:
            numbers = [constant.numbers for constant in inputs]
            if all(n is not None and _fits(n) for n in numbers):
                values = np.asarray(compute(inputs[0].known(), inputs[1].known()))
                # the dtype, int32 or int64, is not tracked: values beyond 32 bits are unknown
                return [KnownConstant.of(values)] if _fits(values) else [result]
        return [result]

    return rule


def _divide(a: Numbers, b: Numbers) -> Numbers:
    if np.any(b == 0):
        raise Unbounded
    return np.trunc(a / b).astype(np.int64)


def _transpose(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    shape = inputs[0].shape
    if shape is None:
        return _same_shape(inputs, attributes)
    order = _ints_attribute(attributes, b"perm") or range(len(shape))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise Unbounded
    return [KnownConstant.shaped([shape[axis] for axis in order], inputs[0].exact)]


def _reshape(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data, target = inputs[0], inputs[1].numbers
    if _int_attribute(attributes, b"allowzero", 0):
        raise Unbounded
    if target is None or data.shape is None or not data.exact:
        return [KnownConstant(data.count)]
    shape = [data.shape[i] if size == 0 else int(size) for i, size in enumerate(target.tolist())]
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = data.count // rest if rest > 0 else 0
    if math.prod(shape) != data.count or min(shape, default=0) < 0:
        raise Unbounded
    if data.numbers is not None:
        return [KnownConstant.of(data.numbers.reshape(shape))]
    return [KnownConstant.shaped(shape)]


def _axes(inputs: list[KnownConstant], attributes: Own) -> list[int] | None:
    if len(inputs) < 2:
        return _ints_attribute(attributes, b"axes")
    return [int(axis) for axis in inputs[1].known().ravel()]


def _unsqueeze(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data, axes = inputs[0], _axes(inputs, attributes)
    if data.shape is None or axes is None:
        return [KnownConstant(data.count)]
    view = np.broadcast_to(np.zeros((), np.int64), data.shape)
    shape = np.expand_dims(view, tuple(axes)).shape
    if data.numbers is not None:
        return [KnownConstant.of(data.numbers.reshape(shape))]
    return [KnownConstant.shaped(shape, data.exact)]


def _squeeze(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data = inputs[0]
    if data.numbers is None or not data.exact:
        return [KnownConstant(data.count)]
    axes = _axes(inputs, attributes)
    return [KnownConstant.of(np.squeeze(data.numbers, None if axes is None else tuple(axes)))]


def _concat(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    count, shapes = (
        sum(constant.count for constant in inputs),
        [constant.shape for constant in inputs],
    )
    rank = len(shapes[0] or ())
    if any(shape is None or len(shape) != rank for shape in shapes) or not rank:
        return [KnownConstant(count)]
    if b"axis" not in attributes:  # early opsets default to 1
        raise Unbounded
    axis = _int_attribute(attributes, b"axis", 0) % rank
    numbers = [constant.numbers for constant in inputs]
    if count <= SMALL and all(n is not None for n in numbers):
        return [KnownConstant.of(np.concatenate([constant.known() for constant in inputs], axis))]
    columns = list(zip(*(shape or () for shape in shapes), strict=True))
    joined = [sum(c) if i == axis else max(c) for i, c in enumerate(columns)]
    return [KnownConstant(count, tuple(joined), all(constant.exact for constant in inputs))]


def _shape(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data = inputs[0]
    if data.shape is None:
        return [KnownConstant(RANK, (RANK,), False)]
    part = data.shape[
        _int_attribute(attributes, b"start", 0) : _int_attribute(
            attributes, b"end", len(data.shape)
        )
    ]
    return [KnownConstant.of(part) if data.exact else KnownConstant.shaped([len(part)])]


def _size(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    is_known = inputs[0].exact and inputs[0].shape is not None
    return [KnownConstant.of(inputs[0].count) if is_known else KnownConstant.shaped(())]


def _sizes(numbers: Numbers) -> list[int]:
    sizes = [int(size) for size in numbers.ravel()]
    if min(sizes, default=0) < 0 or len(sizes) > RANK:
        raise Unbounded
    return sizes


def _constant_of_shape(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    return [KnownConstant.shaped(_sizes(inputs[0].known()))]


def _expand(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    return [_broadcast_result([inputs[0], KnownConstant.shaped(_sizes(inputs[1].known()))])]


def _range(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    start, limit, step = (int(constant.known().ravel()[0]) for constant in inputs)
    count = max(0, -((start - limit) // step))
    if count <= SMALL:
        return [KnownConstant.of(range(start, limit, step))]
    return [KnownConstant.shaped([count])]


def _slice(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data = inputs[0]
    numbers = [constant.numbers for constant in inputs]
    if len(data.shape or ()) == 1 and len(inputs) >= 3 and all(n is not None for n in numbers):
        start, end = (int(constant.known().ravel()[0]) for constant in inputs[1:3])
        step = int(inputs[4].known().ravel()[0]) if len(inputs) > 4 else 1
        if step > 0:
            return [KnownConstant.of(data.known()[start:end:step])]
    return [KnownConstant(data.count, data.shape, False)]


def _split(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data, parts = inputs[0], _int_attribute(attributes, b"num_outputs", 0)
    if data.numbers is not None and len(data.shape or ()) == 1:
        sizes = inputs[1].known().ravel() if len(inputs) > 1 else None
        if sizes is not None and int(sizes.sum()) == data.count and sizes.min() >= 0:
            return [
                KnownConstant.of(part) for part in np.split(data.numbers, np.cumsum(sizes)[:-1])
            ]
        if sizes is None and parts and data.count % parts == 0:
            return [KnownConstant.of(part) for part in np.split(data.numbers, parts)]
    return [KnownConstant(data.count, data.shape, False)]


def _gather(inputs: list[KnownConstant], attributes: Own) -> list[KnownConstant]:
    data, indices = inputs[:2]
    if data.shape is None or indices.shape is None or not data.shape:
        return [KnownConstant(data.count * max(1, indices.count))]
    axis = _int_attribute(attributes, b"axis", 0) % len(data.shape)
    if data.numbers is not None and indices.numbers is not None:
        return [KnownConstant.of(np.take(data.numbers, indices.numbers, axis))]
    shape = (*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    return [KnownConstant.shaped(shape, data.exact and indices.exact)]


RULES: dict[bytes, Rule] = {
    **dict.fromkeys(
        b"Abs Clip Cos DequantizeLinear Exp Floor Gelu IsNaN Log Neg Not QuantizeLinear Relu Round "
        b"ScatterElements ScatterND Sigmoid Sin Softmax Softplus Sqrt Tanh".split(),
        _same_shape,
    ),
    **dict.fromkeys(
        b"And BitShift BitwiseAnd BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Min "
        b"Or Pow Sum Where".split(),
        _broadcast,
    ),
    b"Add": _arithmetic(np.add), b"Sub": _arithmetic(np.subtract),
    b"Mul": _arithmetic(np.multiply), b"Div": _arithmetic(_divide),
    b"Cast": _cast, b"Concat": _concat, b"ConstantOfShape": _constant_of_shape, b"Expand": _expand,
    b"Gather": _gather, b"Identity": _identity, b"Range": _range, b"Reshape": _reshape,
    b"Shape": _shape, b"Size": _size, b"Slice": _slice, b"Split": _split, b"Squeeze": _squeeze,
    b"Transpose": _transpose, b"Unsqueeze": _unsqueeze,
}  # fmt: skip
