"""Triton's interpreter at a tenth of its time, by caching what it recomputes for every operation.

The original lists the members of `triton.language` at each call of a function, creates the same few
types and shapes for each value, determines a common type for each pair of operands, and checks for
integer overflow with six operations of its own without reporting the result. Here all of that is
done once, or in numpy (tests/quick_operations.py), and an overflow is an error.
`tests/kernels/test_quick_interpreter.py` compares it with the original. Written for the Triton of
constraints.txt.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import TensorHandle

from tests import quick_operations

# object, name, original value, replacement
_CHANGES: list[tuple[Any, str, Any, Any]] = []
# what a launch has patched in `triton.language`
_PATCHED: list[Any] = []


def install() -> None:
    """Use the faster interpreter in this process from now on."""
    if not _CHANGES:
        changes = [
            *_patched_once(), *_calls_direct(), *_types_kept(), *_checks_in_numpy(),
            (tl, "sum", quick_operations.summed(tl.sum)),
        ]  # fmt: skip
        _CHANGES.extend((place, name, getattr(place, name), new) for place, name, new in changes)
    for place, name, _, new in _CHANGES:
        setattr(place, name, new)


@contextmanager
def as_it_comes() -> Iterator[None]:
    """Use Triton's own interpreter inside the context."""
    while _PATCHED:
        _PATCHED.pop().restore()
    for place, name, old, _ in _CHANGES:
        setattr(place, name, old)
    try:
        yield
    finally:
        install()


def _patched_once() -> list[tuple[Any, str, Any]]:
    """Patch `triton.language` at the first launch, and leave it so for the next ones."""
    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": core})

    def patch_lang(function: Any) -> Any:
        if not _PATCHED:
            _PATCHED.append(patch(everything))
        return interpreter._LangPatchScope()

    def call_arguments(function: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """Return the arguments by name; the original lists the parameters anew."""
        spec = parameters(function)
        if not given:
            last = spec.args[len(spec.args) - len(spec.defaults or ()) :]
            found = dict(zip(last, spec.defaults or (), strict=True)) | named
            if found.keys() == set(spec.args):
                return found
        return inspect.getcallargs(function, *given, **named)

    parameters = functools.cache(inspect.getfullargspec)
    seen = {**vars(inspect), "getfullargspec": parameters, "getcallargs": call_arguments}

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        function = self.rewritten_fn.get(self.fn) or self.rewrite()
        try:
            return function(*arguments, **named)
        except Exception as problem:
            raise InterpreterError(repr(problem)) from problem

    return [
        (interpreter, "_patch_lang", patch_lang),
        (interpreter, "inspect", SimpleNamespace(**seen)),
        (interpreter.InterpretedFunction, "__call__", call),
    ]


def _calls_direct() -> list[tuple[Any, str, Any]]:
    """Call members of `triton.language` without the guards for use outside kernels."""
    guard, unwrap, tensor = core.add.__code__, core._unwrap_if_constexpr, core.tensor
    semantic = interpreter.interpreter_semantic
    quick = {(place, name): make for place, name, make in quick_operations.operations()}

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is guard else member

        def called(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
            return inner(*arguments, **named, _semantic=semantic)

        make = quick.get((place, name))
        scope.set_attr(place, name, make(called) if make else called)

    def unwrapped(value: Any) -> Any:
        return value if type(value) is tensor else unwrap(value)

    return [
        (interpreter, "_patch_attr", patch_attr),
        (core, "_unwrap_if_constexpr", unwrapped),
    ]


def _types_kept() -> list[tuple[Any, str, Any]]:
    """Create shapes, block types and numpy's types once."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    dtypes: dict[str, Any] = {}
    new_block, numpy_of = core.block_type.__init__, interpreter._get_np_dtype
    broadcast, check = TritonSemantic.broadcast_impl_value, TensorHandle.__post_init__

    def new_handle(self: Any, data: Any, kind: Any) -> None:
        self.data, self.dtype, self.attr = data, kind, {}
        if data.itemsize > 1:
            check(self)

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        if shape not in shapes:
            sizes = core.tuple([core.constexpr(size) for size in shape])
            shapes[shape] = core.constexpr(math.prod(shape)), sizes
        self.numel, self.shape = shapes[shape]

    def block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = (each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = (element.name, *sizes)
        if key not in blocks:
            new_block(self, element, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = blocks[key]

    def np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_of(kind)
        return dtypes[name]

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return [
        (TensorHandle, "__init__", new_handle),
        (core.tensor, "__init__", new_tensor),
        (core.block_type, "__init__", block_type),
        (interpreter, "_get_np_dtype", np_dtype),
        (TritonSemantic, "broadcast_impl_value", broadcast_values),
    ]


def _checks_in_numpy() -> list[tuple[Any, str, Any]]:
    """Check integer overflow in numpy's 64 bits, and raise an error."""

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind, name = lhs.type.scalar, operation.__name__
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert kind == rhs.type.scalar and kind.is_int(), f"{kind} and {rhs.type.scalar}"
        quick_operations.exact(quick_operations.EXACT[name], lhs.handle.data, rhs.handle.data)

    return [(TritonSemantic, "binary_op_sanitize_overflow_impl", check)]
