"""The commonest operations of kernels straight in numpy, for tests/quick_interpreter.py.

Triton's interpreter takes some forty calls to add two tensors. Here one dictionary tells the type
of the result, and numpy does the rest: it broadcasts as Triton does, since a scalar is an array of
one value. Each operation handles the types that are common in kernels and leaves others to Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

tensor, constexpr = core.tensor, core.constexpr
Operation = Callable[..., Any]

# types whose operations are those of numpy, and which of them a number of Python keeps as they are
FLOATS, INTEGERS = frozenset({"fp32", "fp64"}), frozenset({"int32", "int64"})
NUMBERS, BITS = FLOATS | INTEGERS, INTEGERS | {"int1", "int8", "uint8"}
# operations in which integers may overflow
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
# conversions that are numpy's
_PLAIN = {
    *itertools.permutations(("fp32", "int8", "uint8", "int32"), 2),
    *(("int1", b) for b in ("fp32", "int8", "int32")), ("int32", "int64"), ("int64", "int32"),
    ("fp16", "fp32"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "fp32"),
}  # fmt: skip

# attributes of a tensor by the name of its type and its shape
_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}
# one value of the type that a number of Python gets beside a tensor of a type
_LITERALS: dict[tuple[Any, ...], Any] = {}
# pointed-to types by the name of a pointer: type, numpy's, and bytes; None: leave it to Triton
_ELEMENTS: dict[str, tuple[Any, Any, int] | None] = {}


def operations() -> list[tuple[Any, str, Callable[[Operation], Operation]]]:
    """Return what of `triton.language` is replaced: the place, the name, and what makes the
    replacement of Triton's own.
    """
    found: list[tuple[Any, str, Callable[[Operation], Operation]]] = [
        (tensor, "__getitem__", _indexed), (tensor, "to", _converted), (tl, "load", _load),
        (tl, "store", _store), (tl, "where", _where), (tl, "exp", _unary(np.exp)),
        (tl, "exp2", _unary(np.exp2)), (tl, "arange", _arange),
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
    for name, function in {"and": np.bitwise_and, "or": np.bitwise_or}.items():
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
            return _made(found.astype(x.handle.data.dtype, copy=False), x.dtype, True)
        return _made(np.array([found]).astype(x.handle.data.dtype), x.dtype, False)

    return called


def _handle(data: Any, kind: Any) -> TensorHandle:
    """Return a handle, without the checks of its type."""
    made = TensorHandle.__new__(TensorHandle)
    made.data, made.dtype, made.attr = data, kind, {}
    return made


def _made(data: Any, kind: Any, block: bool, held: Any = None) -> Any:
    """Return a tensor of scalars of type `kind`; `held`: the type in its handle, if another."""
    shape = data.shape if block else ()
    kept = _KEPT.get((kind.name, shape))
    handle = _handle(data, held or kind)
    if kept is None:
        sample = tensor(handle, core.block_type(kind, list(shape)) if block else kind)
        kept = {key: value for key, value in vars(sample).items() if key != "handle"}
        _KEPT[kind.name, shape] = kept
    made = tensor.__new__(tensor)
    made.__dict__ = {**kept, "handle": handle}
    return made


def _is_block(value: Any) -> bool:
    return type(value.type) is core.block_type


def _literal(kind: str, value: Any) -> Any:
    """Return [1] with the number beside tensors of type `kind`; None if these are converted too."""
    if type(value) is constexpr:
        value = value.value
    # 0.0 and -0.0 are equal, and so are 1 and True
    key = kind, type(value), value if type(value) is int else repr(value)
    if key not in _LITERALS:
        _LITERALS[key] = None
        if type(value) in (int, float, bool):
            element = getattr(tl, {"fp32": "float32", "fp64": "float64"}.get(kind, kind))
            sample = tensor(
                TensorHandle(np.zeros(1, interpreter._get_np_dtype(element)), element), element
            )
            semantic = interpreter.interpreter_semantic
            left, right = TritonSemantic.binary_op_type_checking_impl(semantic, sample, value)
            if left is sample:
                right.handle.data.flags.writeable = False
                _LITERALS[key] = right.handle.data
    return _LITERALS[key]


def _beside(kind: str, other: Any) -> Any:
    """Return the data of the other operand if that is of type `kind` too; else None."""
    if type(other) is tensor:
        return other.handle.data if other.dtype.name == kind else None
    return _literal(kind, other) if kind in NUMBERS else None


def _divided(left: Any, right: Any) -> Any:
    """Divide integers, rounding towards zero."""
    return (left - np.fmod(left, right)) // right


def _extreme(floats: Any, integers: Any) -> Callable[[Operation], Operation]:
    """Return what makes a minimum or maximum that a NaN does not reach."""

    def made(own: Operation) -> Operation:
        def called(x: Any, y: Any, *how: Any, _semantic: Any = None, **named: Any) -> Any:
            first, second = (x, y) if type(x) is tensor else (y, x)
            kind = first.dtype if type(first) is tensor else None
            other = None if kind is None or kind.name not in NUMBERS else _beside(kind.name, second)
            if kind is None or other is None or how or named:
                return own(x, y, *how, **named)
            block = _is_block(first) or (type(second) is tensor and _is_block(second))
            function = floats if kind.name in FLOATS else integers
            data = first.handle.data
            found = function(data, other) if first is x else function(other, data)
            return _made(found, kind, block)

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
            block = _is_block(self)
            if kind.name not in kinds:
                moved = _moved(self, other) if function is np.add and not swapped else None
                return own(self, other) if moved is None else moved
            right = _beside(kind.name, other)
            if right is None:
                return own(self, other)
            block = block or (type(other) is tensor and _is_block(other))
            left, right = (right, data) if swapped else (data, right)
            if checked and kind.name == "int32":
                found = exact(function, left, right)
            else:
                found = function(left, right)
            return _made(found, tl.int1, block, kind) if truth else _made(found, kind, block)

        return called

    return made


def exact(function: Any, left: Any, right: Any) -> Any:
    """Return a sum, a difference or a product of integers below 64 bits. Raises AssertionError if
    it overflows.
    """
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
    block = _is_block(pointer)
    if type(offset) is tensor:
        if offset.dtype.name not in INTEGERS:
            return None
        by = offset.handle.data
        block = block or _is_block(offset)
    else:
        by = _literal("int32", offset)
        if by is None:
            return None
    by = by.astype(np.uint64)
    found = pointer.handle.data + (by if element[2] == 1 else by * np.uint64(element[2]))
    return _made(found, pointer.dtype, block, pointer.handle.dtype)


def _indexed(own: Operation) -> Operation:
    """Make the operation that adds axes of one."""

    def called(self: Any, slices: Any, _semantic: Any = None) -> Any:
        plain = type(slices) is tuple and _is_block(self)
        if not plain or any(each is not None and each != slice(None) for each in slices):
            return own(self, slices)
        return _made(self.handle.data[slices], self.dtype, True, self.handle.dtype)

    return called


def _converted(own: Operation) -> Operation:
    def called(self: Any, dtype: Any, *how: Any, _semantic: Any = None, **named: Any) -> Any:
        target = dtype.value if type(dtype) is constexpr else dtype
        if how or named:
            return own(self, dtype, *how, **named)
        if self.dtype.name == target.name:
            return self
        if (self.dtype.name, target.name) not in _PLAIN:
            return own(self, dtype)
        data = self.handle.data.astype(interpreter._get_np_dtype(target))
        return _made(data, target, _is_block(self))

    return called


def _unary(function: Any) -> Callable[[Operation], Operation]:
    def made(own: Operation) -> Operation:
        def called(x: Any, _semantic: Any = None) -> Any:
            if type(x) is not tensor or x.dtype.name != "fp32":
                return own(x)
            return _made(function(x.handle.data), x.dtype, _is_block(x))

        return called

    return made


def _arange(own: Operation) -> Operation:
    made: dict[tuple[Any, Any], Any] = {}

    def called(start: Any, end: Any, _semantic: Any = None) -> Any:
        key = tuple(each.value if type(each) is constexpr else each for each in (start, end))
        if key not in made:
            made[key] = own(start, end).handle.data
        return _made(made[key], tl.int32, True)

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
        values = [e.handle.data if type(e) is tensor else _literal(kind.name, e) for e in (x, y)]
        if values[0] is None or values[1] is None:
            return own(condition, x, y)
        block = any(_is_block(each) for each in (condition, *tensors))
        return _made(np.where(condition.handle.data, *values), kind, block)

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
        return _handle(np.ones(shape, bool), tl.int1)
    if type(mask) is not tensor or mask.dtype.name != "int1":
        return None
    data = _placed(mask, shape)
    return None if data is None else _handle(data, tl.int1)


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
                data = np.full(shape, value, dtype) if value == 0 else None
            if data is None or (mask is None):
                return own(pointer, mask, other, **how)
            instead = _handle(data, kind)
        builder = interpreter.interpreter_builder
        found = builder.create_masked_load(pointer.handle, at, instead, None, False)
        return _made(found.data, kind, _is_block(pointer))

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
        return builder.create_masked_store(pointer.handle, _handle(data, kind), at, None)

    return called
