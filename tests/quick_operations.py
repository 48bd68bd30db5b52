"""The commonest operations of kernels straight in numpy, for tests/quick_interpreter.py.

Triton's interpreter takes some forty calls to add two tensors. Here one dictionary tells the type
of the result, and numpy does the rest: it broadcasts as Triton does, since a scalar is an array of
one value. Each operation handles the types that are common in kernels and leaves others to Triton.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from tests.quick_values import beside, handle_of, is_block, literal, made_of

tensor, constexpr = core.tensor, core.constexpr
Operation = Callable[..., Any]

# types whose operations are those of numpy, and which of them a number of Python keeps as they are
FLOATS, INTEGERS = frozenset({"fp32", "fp64"}), frozenset({"int32", "int64"})
NUMBERS = FLOATS | INTEGERS
# integers and their bits
_WIDTHS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "int64": 64}
BITS = frozenset(_WIDTHS) | {"int1"}
_CAST = _WIDTHS | {"fp16": 16, "fp32": 32}
# operations in which integers may overflow
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_PYTHONS = {np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul}
_ENDS = {
    np.dtype(name): (int(np.iinfo(name).min), int(np.iinfo(name).max))
    for name in (*_WIDTHS, "uint32")
}
# conversions that are numpy's
_PLAIN = {
    *itertools.permutations((*_WIDTHS, "fp32"), 2),
    *itertools.product(_WIDTHS, ("fp16", "fp64")),
    *(("int1", b) for b in ("fp32", "int8", "int32")),
    ("fp16", "fp32"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "fp32"),
}  # fmt: skip
# types that matrices are multiplied in: of both, and of the sum
_PRODUCTS = {("int8", "int32"), ("fp16", "fp32"), ("fp32", "fp32")}

# shapes and types of products of matrices that Triton has checked
_CHECKED: set[tuple[Any, ...]] = set()
# pointed-to types by the name of a pointer: type, numpy's, and bytes; None: leave it to Triton
_ELEMENTS: dict[str, tuple[Any, Any, int] | None] = {}


def operations() -> list[tuple[Any, str, Callable[[Operation], Operation]]]:
    """Return what of `triton.language` is replaced: the place, the name, and what makes the
    replacement of Triton's own.
    """
    found: list[tuple[Any, str, Callable[[Operation], Operation]]] = [
        (tensor, "__getitem__", _indexed), (tensor, "to", _converted), (tl, "load", _load),
        (tl, "store", _store), (tl, "where", _where), (tl, "exp", _unary(np.exp)),
        (tl, "exp2", _unary(np.exp2)), (tl, "arange", _arange), (tl, "dot", _dot),
        (tl, "fma", _fma), (tl, "broadcast_to", _broadcast), (tl, "full", _full),
        (core, "full", _full), (tensor, "__lshift__", _shift(np.left_shift)),
        (tensor, "__rshift__", _shift(np.right_shift)),
    ]  # fmt: skip
    for name, function in EXACT.items():
        found.append((tensor, f"__{name}__", _binary(function, NUMBERS)))
        found.append((tensor, f"__r{name}__", _binary(function, NUMBERS, swapped=True)))
    found.append((tensor, "__truediv__", _binary(np.divide, FLOATS)))
    found.append((tensor, "__rtruediv__", _binary(np.divide, FLOATS, swapped=True)))
    comparisons = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "eq": np.equal, "ne": np.not_equal,
    }  # fmt: skip
    for name, function in comparisons.items():
        found.append((tensor, f"__{name}__", _binary(function, NUMBERS, truth=True)))
    whole = {"floordiv": _divided, "mod": np.fmod}
    for name, function in whole.items():
        found.append((tensor, f"__{name}__", _binary(function, INTEGERS)))
    extremes = {"maximum": (np.fmax, np.maximum), "minimum": (np.fmin, np.minimum)}
    found.extend((tl, name, _extreme(*functions)) for name, functions in extremes.items())
    bits = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    for name, function in bits.items():
        found.append((tensor, f"__{name}__", _binary(function, BITS)))
    return found


def summed(own: Any) -> Operation:
    """Replace `tl.sum`, which is a kernel function and not a builtin."""

    def called(x: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Any:
        at = axis.value if type(axis) is constexpr else axis
        if x.dtype.name not in ("fp32", "int32") or at is None or keep_dims or dtype is not None:
            return own(x, axis, keep_dims, dtype)
        found = np.sum(x.handle.data, axis=at)
        if found.ndim:
            return made_of(found.astype(x.handle.data.dtype, copy=False), x.dtype, True)
        return made_of(np.array([found]).astype(x.handle.data.dtype), x.dtype, False)

    return called


def _divided(left: Any, right: Any) -> Any:
    """Divide integers, rounding towards zero."""
    return (left - np.fmod(left, right)) // right


def _extreme(floats: Any, integers: Any) -> Callable[[Operation], Operation]:
    """Return what makes a minimum or maximum that a NaN does not reach."""

    def made(own: Operation) -> Operation:
        def called(x: Any, y: Any, *how: Any, _semantic: Any = None, **named: Any) -> Any:
            first, second = (x, y) if type(x) is tensor else (y, x)
            kind = first.dtype if type(first) is tensor else None
            other = None if kind is None or kind.name not in NUMBERS else beside(kind.name, second)
            if kind is None or other is None or how or named:
                return own(x, y, *how, **named)
            block = is_block(first) or (type(second) is tensor and is_block(second))
            function = floats if kind.name in FLOATS else integers
            data = first.handle.data
            found = function(data, other) if first is x else function(other, data)
            return made_of(found, kind, block)

        return called

    return made


def _binary(
    function: Any, kinds: frozenset[str], *, swapped: bool = False, truth: bool = False
) -> Callable[[Operation], Operation]:
    """Return what makes an operation of two operands; `swapped`: the number stands on the left."""
    checked = function in EXACT.values()

    def made(own: Operation) -> Operation:
        def called(self: Any, other: Any, _semantic: Any = None) -> Any:
            kind, data = self.dtype, self.handle.data
            block = is_block(self)
            if kind.name == "int32" and type(other) is tensor and other.dtype.name == "int64":
                kind, data = other.dtype, data.astype(np.int64)
            if kind.name not in kinds:
                moved = _moved(self, other) if function is np.add and not swapped else None
                return own(self, other) if moved is None else moved
            right = beside(kind.name, other)
            if right is None:
                return own(self, other)
            block = block or (type(other) is tensor and is_block(other))
            left, right = (right, data) if swapped else (data, right)
            if checked and kind.name == "int32":
                found = exact(function, left, right)
            else:
                found = function(left, right)
            return made_of(found, tl.int1, block, kind) if truth else made_of(found, kind, block)

        return called

    return made


def _shift(function: Any) -> Callable[[Operation], Operation]:
    """Return what makes a shift by a number below the count of bits."""

    def made(own: Operation) -> Operation:
        def called(self: Any, other: Any, _semantic: Any = None) -> Any:
            by = other.value if type(other) is constexpr else other
            kind = self.dtype
            if type(by) is not int or not 0 <= by < _WIDTHS.get(kind.name, 0):
                return own(self, other)
            return made_of(function(self.handle.data, literal(kind.name, by)), kind, is_block(self))

        return called

    return made


def _dot(own: Operation) -> Operation:
    def called(
        x: Any, y: Any, total: Any = None, input_precision: Any = None, _semantic: Any = None,
        **how: Any,
    ) -> Any:  # fmt: skip
        plain = type(total) is tensor and (x.dtype.name, total.dtype.name) in _PRODUCTS
        if not plain or (how and how != {"out_dtype": total.dtype}):
            return own(x, y, total, input_precision, **how)
        a, b, c = x.handle.data, y.handle.data, total.handle.data
        key = x.dtype.name, y.dtype.name, total.dtype.name, a.shape, b.shape, c.shape
        if key not in _CHECKED:
            found = own(x, y, total, input_precision, **how)
            _CHECKED.add(key)
            return found
        return made_of(np.matmul(a, b, dtype=c.dtype) + c, total.dtype, True)

    return called


def _fma(own: Operation) -> Operation:
    builder = interpreter.interpreter_builder

    def called(x: Any, y: Any, z: Any, _semantic: Any = None) -> Any:
        given = (x, y, z)
        tensors = [each for each in given if type(each) is tensor]
        if any(each.dtype.name != "fp32" for each in tensors) or not tensors:
            return own(x, y, z)
        kind = tensors[0].dtype
        data = [e.handle.data if type(e) is tensor else literal("fp32", e) for e in given]
        if any(each is None for each in data):
            return own(x, y, z)
        found = builder.create_fma(*(handle_of(each, kind) for each in data))
        return made_of(found.data, kind, any(is_block(each) for each in tensors))

    return called


def _broadcast(own: Operation) -> Operation:
    def called(x: Any, *shape: Any, _semantic: Any = None) -> Any:
        sizes = shape[0] if len(shape) == 1 else shape
        if not is_block(x) or type(sizes) not in (tuple, list, core.tuple):
            return own(x, *shape)
        wanted = tuple(each.value if type(each) is constexpr else each for each in sizes)
        data = x.handle.data
        if len(wanted) != data.ndim:
            return own(x, *shape)
        return made_of(np.broadcast_to(data, wanted), x.dtype, True, x.handle.dtype)

    return called


def exact(function: Any, left: Any, right: Any) -> Any:
    """Return a sum, a difference or a product of integers below 64 bits. Raises AssertionError if
    it overflows.
    """
    if left.shape == right.shape == (1,):  # most are addresses' parts: Python is quicker
        one = _PYTHONS[function](left.item(), right.item())
        least, most = _ENDS[left.dtype]
        assert least <= one <= most, f"overflow in {function.__name__} of {left.dtype}"
        return np.array([one], left.dtype)
    wide = function(left, right, dtype=np.int64)
    found = wide.astype(left.dtype)
    assert (found == wide).all(), f"overflow in {function.__name__} of {left.dtype}"
    return found


def _element(pointer: Any) -> tuple[Any, Any, int] | None:
    """Return the type that a tensor of pointers points to."""
    name = pointer.dtype.name
    if name not in _ELEMENTS:
        element = pointer.dtype.element_ty if pointer.dtype.is_ptr() else tl.int1
        dtype = None if element.name == "int1" else interpreter._get_np_dtype(element)
        _ELEMENTS[name] = dtype and (element, dtype, max(1, element.primitive_bitwidth // 8))
    return _ELEMENTS[name]


def _moved(pointer: Any, offset: Any) -> Any:
    """Return pointers plus signed integers, or None."""
    element = _element(pointer)
    if element is None:
        return None
    block = is_block(pointer)
    if type(offset) is tensor:
        if offset.dtype.name not in INTEGERS:
            return None
        by = offset.handle.data
        block = block or is_block(offset)
    else:
        by = literal("int32", offset)
        if by is None:
            return None
    if by.shape == pointer.handle.data.shape == (1,):
        address = pointer.handle.data.item() + by.item() * element[2]
        found = np.array([address % 2**64], np.uint64)
        return made_of(found, pointer.dtype, block, pointer.handle.dtype)
    by = by.astype(np.uint64)
    found = pointer.handle.data + (by if element[2] == 1 else by * np.uint64(element[2]))
    return made_of(found, pointer.dtype, block, pointer.handle.dtype)


def _indexed(own: Operation) -> Operation:
    """Make the operation that adds axes of one."""

    def called(self: Any, slices: Any, _semantic: Any = None) -> Any:
        plain = type(slices) is tuple and is_block(self)
        if not plain or any(each is not None and each != slice(None) for each in slices):
            return own(self, slices)
        return made_of(self.handle.data[slices], self.dtype, True, self.handle.dtype)

    return called


def _converted(own: Operation) -> Operation:
    def called(self: Any, dtype: Any, *how: Any, _semantic: Any = None, **named: Any) -> Any:
        target = dtype.value if type(dtype) is constexpr else dtype
        if named == {"bitcast": True}:
            data = self.handle.data
            if self.dtype.is_ptr() and target.is_ptr():
                return made_of(data, target, is_block(self))
            if (bits := _CAST.get(self.dtype.name)) and bits == _CAST.get(target.name):
                return made_of(data.view(interpreter._get_np_dtype(target)), target, is_block(self))
        if how or named:
            return own(self, dtype, *how, **named)
        if self.dtype.name == target.name:
            return self
        if (self.dtype.name, target.name) not in _PLAIN:
            return own(self, dtype)
        data = self.handle.data.astype(interpreter._get_np_dtype(target))
        return made_of(data, target, is_block(self))

    return called


def _unary(function: Any) -> Callable[[Operation], Operation]:
    def made(own: Operation) -> Operation:
        def called(x: Any, _semantic: Any = None) -> Any:
            if type(x) is not tensor or x.dtype.name != "fp32":
                return own(x)
            return made_of(function(x.handle.data), x.dtype, is_block(x))

        return called

    return made


def _full(own: Operation) -> Operation:
    def called(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
        given = [each.value if type(each) is constexpr else each for each in (*shape, value, dtype)]
        *sizes, value, kind = given
        if type(value) not in (int, float) or kind.name not in NUMBERS or not sizes:
            return own(shape, value, dtype)
        found = literal(kind.name, value)
        if found is None:
            return own(shape, value, dtype)
        return made_of(np.full(sizes, found, found.dtype), kind, True)

    return called


def _arange(own: Operation) -> Operation:
    made: dict[tuple[Any, Any], Any] = {}

    def called(start: Any, end: Any, _semantic: Any = None) -> Any:
        key = tuple(each.value if type(each) is constexpr else each for each in (start, end))
        if key not in made:
            made[key] = own(start, end).handle.data
        return made_of(made[key], tl.int32, True)

    return called


def _where(own: Operation) -> Operation:
    def called(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        tensors = [each for each in (x, y) if type(each) is tensor]
        kinds = {each.dtype.name for each in tensors}
        if type(condition) is not tensor or condition.dtype.name != "int1" or len(kinds) != 1:
            return own(condition, x, y)
        kind = tensors[0].dtype
        if kind.name not in NUMBERS:
            return own(condition, x, y)
        values = [e.handle.data if type(e) is tensor else literal(kind.name, e) for e in (x, y)]
        if values[0] is None or values[1] is None:
            return own(condition, x, y)
        block = any(is_block(each) for each in (condition, *tensors))
        return made_of(np.where(condition.handle.data, *values), kind, block)

    return called


def _placed(value: Any, shape: tuple[int, ...]) -> Any:
    """Return the data of a tensor in a shape, or None where it has another or larger one."""
    data = value.handle.data
    if data.shape == shape:
        return data
    try:
        return np.broadcast_to(data, shape)
    except ValueError:
        return None


def _masked(pointer: Any, mask: Any) -> Any:
    """Return the handle of a mask for each pointer, or None: leave it to Triton."""
    shape = pointer.handle.data.shape
    if mask is None:
        return handle_of(_filled(shape, True, np.bool_), tl.int1)
    if type(mask) is not tensor or mask.dtype.name != "int1":
        return None
    data = _placed(mask, shape)
    return None if data is None else handle_of(data, tl.int1)


@functools.cache
def _filled(shape: tuple[int, ...], value: float, dtype: Any) -> Any:
    """Return an array of one value, which is only read."""
    made = np.full(shape, value, dtype)
    made.flags.writeable = False
    return made


def _load(own: Operation) -> Operation:
    def called(
        pointer: Any, mask: Any = None, other: Any = None, _semantic: Any = None, **how: Any
    ) -> Any:
        element, at = _element(pointer), _masked(pointer, mask)
        instead = None
        if element is None or at is None or "volatile" in how:
            return own(pointer, mask, other, **how)
        kind, dtype, _ = element
        if other is not None:
            shape = pointer.handle.data.shape
            if type(other) is tensor:
                data = _placed(other, shape) if other.dtype.name == kind.name else None
            else:
                value = other.value if type(other) is constexpr else other
                # -0.0 would be kept as 0.0
                usual = str(value) != "-0.0" and (value == 0 or kind.name in FLOATS)
                data = _filled(shape, value, dtype) if usual else None
            if data is None or (mask is None):
                return own(pointer, mask, other, **how)
            instead = handle_of(data, kind)
        builder = interpreter.interpreter_builder
        found = builder.create_masked_load(pointer.handle, at, instead, None, False)
        return made_of(found.data, kind, is_block(pointer))

    return called


def _store(own: Operation) -> Operation:
    def called(
        pointer: Any, value: Any, mask: Any = None, _semantic: Any = None, **how: Any
    ) -> Any:
        element, at = _element(pointer), _masked(pointer, mask)
        if element is None or at is None or type(value) is not tensor:
            return own(pointer, value, mask, **how)
        kind = element[0]
        data = _placed(value, pointer.handle.data.shape)
        if value.dtype.name != kind.name or data is None:
            return own(pointer, value, mask, **how)
        builder = interpreter.interpreter_builder
        return builder.create_masked_store(pointer.handle, handle_of(data, kind), at, None)

    return called
