"""Rules that bound the results of standard ops on constants: sizes, shapes and small values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.runtime.graph import Message, integers

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


def _number(own: Own, name: bytes, default: int) -> int:
    return integers([own[name]["i"]])[0] if "i" in own.get(name, {}) else default


def _list(own: Own, name: bytes) -> list[int] | None:
    return integers(own[name]["ints"]) if "ints" in own.get(name, {}) else None


def _same(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    first = reads[0]
    return [KnownConstant(first.count, first.shape, first.exact)]


def _identity(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    return reads[:1]


def _fits(numbers: Numbers) -> bool:
    """Return whether all numbers fit into 32 bits."""
    return bool(np.all(abs(numbers) < 1 << 31))


def _cast(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    numbers, to = reads[0].numbers, _number(own, b"to", 0)
    fits = to == 7 or (to == 6 and numbers is not None and _fits(numbers))
    return reads[:1] if fits else _same(reads, own)


def _together(reads: list[KnownConstant]) -> KnownConstant:
    """Return the broadcast shape of an elementwise op."""
    if any(read.shape is None for read in reads):
        return KnownConstant(math.prod(max(1, read.count) for read in reads))
    shapes = [read.shape or () for read in reads]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    joined = [0 if 0 in axis else max(axis) for axis in zip(*padded, strict=True)]
    exact = all(read.exact for read in reads)
    # with inexact shapes a 0 is only a bound: the other operand's axis may decide
    joined = joined if exact else [max(axis) for axis in zip(*padded, strict=True)]
    return KnownConstant.shaped(joined, exact)


def _broadcast(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    return [_together(reads)]


def _arithmetic(compute: Callable[[Numbers, Numbers], Any]) -> Rule:
    def rule(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
        made = _together(reads)
        if len(reads) == 2 and made.count <= SMALL:
            numbers = [read.numbers for read in reads]
            if all(n is not None and _fits(n) for n in numbers):
                found = np.asarray(compute(reads[0].known(), reads[1].known()))
                # the dtype, int32 or int64, is not tracked: values beyond 32 bits are unknown
                return [KnownConstant.of(found)] if _fits(found) else [made]
        return [made]

    return rule


def _divided(a: Numbers, b: Numbers) -> Numbers:
    if np.any(b == 0):
        raise Unbounded
    return np.trunc(a / b).astype(np.int64)


def _transpose(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    shape = reads[0].shape
    if shape is None:
        return _same(reads, own)
    order = _list(own, b"perm") or range(len(shape))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise Unbounded
    return [KnownConstant.shaped([shape[axis] for axis in order], reads[0].exact)]


def _reshape(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data, wanted = reads[0], reads[1].numbers
    if _number(own, b"allowzero", 0):
        raise Unbounded
    if wanted is None or data.shape is None or not data.exact:
        return [KnownConstant(data.count)]
    shape = [data.shape[i] if size == 0 else int(size) for i, size in enumerate(wanted.tolist())]
    if -1 in shape:
        rest = -math.prod(shape)
        shape[shape.index(-1)] = data.count // rest if rest > 0 else 0
    if math.prod(shape) != data.count or min(shape, default=0) < 0:
        raise Unbounded
    if data.numbers is not None:
        return [KnownConstant.of(data.numbers.reshape(shape))]
    return [KnownConstant.shaped(shape)]


def _axes(reads: list[KnownConstant], own: Own) -> list[int] | None:
    if len(reads) < 2:
        return _list(own, b"axes")
    return [int(axis) for axis in reads[1].known().ravel()]


def _unsqueeze(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data, axes = reads[0], _axes(reads, own)
    if data.shape is None or axes is None:
        return [KnownConstant(data.count)]
    view = np.broadcast_to(np.zeros((), np.int64), data.shape)
    shape = np.expand_dims(view, tuple(axes)).shape
    if data.numbers is not None:
        return [KnownConstant.of(data.numbers.reshape(shape))]
    return [KnownConstant.shaped(shape, data.exact)]


def _squeeze(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data = reads[0]
    if data.numbers is None or not data.exact:
        return [KnownConstant(data.count)]
    axes = _axes(reads, own)
    return [KnownConstant.of(np.squeeze(data.numbers, None if axes is None else tuple(axes)))]


def _concat(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    count, shapes = sum(read.count for read in reads), [read.shape for read in reads]
    rank = len(shapes[0] or ())
    if any(shape is None or len(shape) != rank for shape in shapes) or not rank:
        return [KnownConstant(count)]
    if b"axis" not in own:  # early opsets default to 1
        raise Unbounded
    axis = _number(own, b"axis", 0) % rank
    numbers = [read.numbers for read in reads]
    if count <= SMALL and all(each is not None for each in numbers):
        return [KnownConstant.of(np.concatenate([read.known() for read in reads], axis))]
    columns = list(zip(*(shape or () for shape in shapes), strict=True))
    joined = [sum(c) if i == axis else max(c) for i, c in enumerate(columns)]
    return [KnownConstant(count, tuple(joined), all(read.exact for read in reads))]


def _shape(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data = reads[0]
    if data.shape is None:
        return [KnownConstant(RANK, (RANK,), False)]
    part = data.shape[_number(own, b"start", 0) : _number(own, b"end", len(data.shape))]
    return [KnownConstant.of(part) if data.exact else KnownConstant.shaped([len(part)])]


def _size(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    told = reads[0].exact and reads[0].shape is not None
    return [KnownConstant.of(reads[0].count) if told else KnownConstant.shaped(())]


def _sizes(numbers: Numbers) -> list[int]:
    sizes = [int(size) for size in numbers.ravel()]
    if min(sizes, default=0) < 0 or len(sizes) > RANK:
        raise Unbounded
    return sizes


def _filled(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    return [KnownConstant.shaped(_sizes(reads[0].known()))]


def _expand(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    return [_together([reads[0], KnownConstant.shaped(_sizes(reads[1].known()))])]


def _range(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    start, limit, step = (int(read.known().ravel()[0]) for read in reads)
    count = max(0, -((start - limit) // step))
    if count <= SMALL:
        return [KnownConstant.of(range(start, limit, step))]
    return [KnownConstant.shaped([count])]


def _slice(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data = reads[0]
    numbers = [read.numbers for read in reads]
    if len(data.shape or ()) == 1 and len(reads) >= 3 and all(n is not None for n in numbers):
        start, end = (int(read.known().ravel()[0]) for read in reads[1:3])
        step = int(reads[4].known().ravel()[0]) if len(reads) > 4 else 1
        if step > 0:
            return [KnownConstant.of(data.known()[start:end:step])]
    return [KnownConstant(data.count, data.shape, False)]


def _split(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data, parts = reads[0], _number(own, b"num_outputs", 0)
    if data.numbers is not None and len(data.shape or ()) == 1:
        sizes = reads[1].known().ravel() if len(reads) > 1 else None
        if sizes is not None and int(sizes.sum()) == data.count and sizes.min() >= 0:
            return [
                KnownConstant.of(part) for part in np.split(data.numbers, np.cumsum(sizes)[:-1])
            ]
        if sizes is None and parts and data.count % parts == 0:
            return [KnownConstant.of(part) for part in np.split(data.numbers, parts)]
    return [KnownConstant(data.count, data.shape, False)]


def _gather(reads: list[KnownConstant], own: Own) -> list[KnownConstant]:
    data, at = reads[:2]
    if data.shape is None or at.shape is None or not data.shape:
        return [KnownConstant(data.count * max(1, at.count))]
    axis = _number(own, b"axis", 0) % len(data.shape)
    if data.numbers is not None and at.numbers is not None:
        return [KnownConstant.of(np.take(data.numbers, at.numbers, axis))]
    shape = (*data.shape[:axis], *at.shape, *data.shape[axis + 1 :])
    return [KnownConstant.shaped(shape, data.exact and at.exact)]


RULES: dict[bytes, Rule] = {
    **dict.fromkeys(
        b"Abs Clip Cos DequantizeLinear Exp Floor Gelu IsNaN Log Neg Not QuantizeLinear Relu Round "
        b"ScatterElements ScatterND Sigmoid Sin Softmax Softplus Sqrt Tanh".split(),
        _same,
    ),
    **dict.fromkeys(
        b"And BitShift BitwiseAnd BitwiseXor Equal Greater GreaterOrEqual Less LessOrEqual Max Min "
        b"Or Pow Sum Where".split(),
        _broadcast,
    ),
    b"Add": _arithmetic(np.add), b"Sub": _arithmetic(np.subtract),
    b"Mul": _arithmetic(np.multiply), b"Div": _arithmetic(_divided),
    b"Cast": _cast, b"Concat": _concat, b"ConstantOfShape": _filled, b"Expand": _expand,
    b"Gather": _gather, b"Identity": _identity, b"Range": _range, b"Reshape": _reshape,
    b"Shape": _shape, b"Size": _size, b"Slice": _slice, b"Split": _split, b"Squeeze": _squeeze,
    b"Transpose": _transpose, b"Unsqueeze": _unsqueeze,
}  # fmt: skip
