"""ctypes bindings of the compiled CPU kernels."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge.launch import Variant

SET_VARIABLE = "EDGE_CPU_SET"
LIBRARY_VARIABLE = "EDGE_CPU_LIBRARY"
VERSION = 7  # edge_cpu_version of src/library.cpp
_MESSAGE = 512
_REMEDY = "install a C++ compiler and run pip install again, or use --engine ort"


class CallValue(ctypes.Union):
    """One argument of a call."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("integer", ctypes.c_int64),
        ("number", ctypes.c_float),
    )


class CpuCall(ctypes.Structure):
    """One launch or copy: a kernel, its argument values and its grid, as on a GPU. For a run over
    several states, `states` is their number and `values` has the address of each one's values.
    """

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("values", ctypes.POINTER(CallValue)),
        ("grid", ctypes.c_int64 * 3),
        ("states", ctypes.c_int64),
    )


class CpuReader(ctypes.Structure):
    """A launch argument that points to a weight of `bytes` bytes; `argument` is its index, or -1 if
    it does not point to the start of the weight.
    """

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("argument", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


@functools.cache
def path() -> Path | None:
    """Return the library's path: EDGE_CPU_LIBRARY if set (`make sanitize`), else the installed one,
    or None if the install could not compile it.
    """
    if override := os.environ.get(LIBRARY_VARIABLE):
        return Path(override)
    folder = Path(__file__).parent
    # a checkout may still have the file of one Python that earlier versions compiled
    suffixes = sorted(importlib.machinery.EXTENSION_SUFFIXES, key=lambda s: "abi3" not in s)
    return next((f for s in suffixes if (f := folder / f"_native{s}").exists()), None)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library. Raises EngineError when it is missing or its version differs."""
    file = path()
    if file is None:
        raise EngineError(
            "the CPU kernels are not compiled",
            remedy=_REMEDY,
        )
    try:
        native = ctypes.CDLL(str(file))
    except OSError as problem:
        raise EngineError(f"cannot be loaded: {problem}", file=file, remedy=_REMEDY) from problem
    if getattr(native, "edge_cpu_version", int)() != VERSION:
        raise EngineError(
            "was compiled from a different version of the sources",
            file=file,
            remedy="run pip install again; in a checkout, run make chat",
        )
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    native.edge_cpu_sets.argtypes = (text, ctypes.c_int)
    native.edge_cpu_pool.restype = pointer
    native.edge_cpu_pool.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
    native.edge_cpu_pool_free.argtypes = (pointer,)
    native.edge_cpu_kernel.restype = pointer
    native.edge_cpu_kernel.argtypes = (text, text, text, ctypes.c_int)
    native.edge_cpu_kernel_free.argtypes = (pointer,)
    native.edge_cpu_interleave.argtypes = (pointer, ctypes.c_int64)
    native.edge_cpu_read_alike.restype = None
    native.edge_cpu_read_alike.argtypes = (pointer, pointer)
    native.edge_cpu_run.argtypes = (pointer, pointer, ctypes.c_int64)
    return native


def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets that this machine supports and kernels exist for, best last."""
    buffer = ctypes.create_string_buffer(_MESSAGE)
    library().edge_cpu_sets(buffer, _MESSAGE)
    return tuple(buffer.value.decode().split())


def instruction_set() -> str:
    """Return EDGE_CPU_SET, or the best set. Raises EngineError when the machine lacks it."""
    available = instruction_sets()
    requested = os.environ.get(SET_VARIABLE, "")
    if requested and requested not in available:
        raise EngineError(
            f"this machine has no {requested!r}",
            field=SET_VARIABLE,
            remedy=f"choose {', '.join(available)}",
        )
    return requested or available[-1]


def installed(sources: Sequence[str]) -> str:
    """Describe in a line what an install made of these sources, since pip hides the compiler."""
    file = path()
    if file is None or not file.exists():
        found = "were not compiled, so ONNX Runtime runs instead"
    elif any(os.stat(source).st_mtime > file.stat().st_mtime for source in sources):
        found = f"were not compiled: {file} is older than its sources"
    else:
        try:
            return f"compiled the kernels for CPUs: {file}, {instruction_set()} on this machine"
        except EngineError as problem:
            found = f"cannot run: {problem}"
    return f"the kernels for CPUs {found}; edge doctor says more"


class CpuKernel:
    """A variant's kernel. Raises EngineError when there is none for CPUs."""

    def __init__(self, text: str, name: str) -> None:
        self._library = library()
        problem = ctypes.create_string_buffer(_MESSAGE)
        self.handle = self._library.edge_cpu_kernel(name.encode(), text.encode(), problem, _MESSAGE)
        if not self.handle:
            raise EngineError(problem.value.decode(errors="replace"))

    def read_alike(self, other: CpuKernel) -> None:
        """Read weights in the layout that `other`, a kernel with the same weights, uses."""
        self._library.edge_cpu_read_alike(self.handle, other.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.edge_cpu_kernel_free(self.handle)


def text_of(variant: Variant) -> str:
    """Format a variant for the library. Raises EngineError when a name contains whitespace."""
    words = [variant.kernel, *variant.arguments, *variant.types, *variant.constants]
    words += [value for value in variant.constants.values() if isinstance(value, str)]
    if invalid := [word for word in words if len(word.split()) != 1 or word != word.strip()]:
        raise EngineError(f"{variant.kernel!r:.60}: {invalid[0]!r:.60} is not one word")
    lines = [f"kernel {variant.kernel}"]
    lines += [f"argument {n} {t}" for n, t in zip(variant.arguments, variant.types, strict=True)]
    for name, value in variant.constants.items():
        printed = "" if value is None else str(int(value) if isinstance(value, bool) else value)
        lines.append(f"constant {name} {printed}".rstrip())
    return "\n".join(lines)
