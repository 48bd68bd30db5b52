"""Tensors of Triton's interpreter, made without its checks, for tests/quick_operations.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

tensor, constexpr = core.tensor, core.constexpr

# attributes of a tensor by the name of its type and its shape
_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}
# one value of the type that a number of Python gets beside a tensor of a type
_LITERALS: dict[tuple[Any, ...], Any] = {}


def handle_of(data: Any, kind: Any) -> TensorHandle:
    """Return a handle, without the checks of its type."""
    made = TensorHandle.__new__(TensorHandle)
    made.__dict__ = {"data": data, "dtype": kind, "attr": {}}
    return made


def made_of(data: Any, kind: Any, block: bool, held: Any = None) -> Any:
    """Return a tensor of scalars of type `kind`; `held`: the type in its handle, if another."""
    shape = data.shape if block else ()
    kept = _KEPT.get((kind.name, shape))
    handle = TensorHandle.__new__(TensorHandle)
    handle.__dict__ = {"data": data, "dtype": held or kind, "attr": {}}
    if kept is None:
        sample = tensor(handle, core.block_type(kind, list(shape)) if block else kind)
        kept = {key: value for key, value in vars(sample).items() if key != "handle"}
        _KEPT[kind.name, shape] = kept
    made = tensor.__new__(tensor)
    made.__dict__ = {**kept, "handle": handle}
    return made


def is_block(value: Any) -> bool:
    return type(value.type) is core.block_type


def literal(kind: str, value: Any) -> Any:
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


def beside(kind: str, other: Any) -> Any:
    """Return the data of the other operand as type `kind`; None if the result has another type."""
    if type(other) is not tensor:
        return literal(kind, other)
    if other.dtype.name == kind:
        return other.handle.data
    wider = kind == "int64" and other.dtype.name == "int32"
    return other.handle.data.astype(np.int64) if wider else None
