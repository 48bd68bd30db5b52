"""The compiled kernels for CPUs, through ctypes: variants in, calls out."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import EngineError

if TYPE_CHECKING:
    from edge.launch import Variant

SET_VARIABLE = "EDGE_CPU_SET"
LIBRARY_VARIABLE = "EDGE_CPU_LIBRARY"
VERSION = 6  # edge_cpu_version of src/library.cpp
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
    """One launch, or one copy: a kernel, its values and what a GPU's grid would be; of several
    states, how many, and the addresses of their values.
    """

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("values", ctypes.POINTER(CallValue)),
        ("grid", ctypes.c_int64 * 3),
        ("states", ctypes.c_int64),
    )


class CpuReader(ctypes.Structure):
    """An argument of a launch that points into a weight of so many bytes; -1 for one that points
    behind its beginning.
    """

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("argument", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
    )


@functools.cache
def path() -> Path | None:
    """Where the library is, or the one that EDGE_CPU_LIBRARY names (`make sanitize`); None where
    the install could not compile it.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        return Path(named)
    here = Path(__file__).parent
    names = ["_native" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((here / name for name in names if (here / name).exists()), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The library. Raises EngineError where there is none, or one of other sources."""
    file = path()
    if file is None:
        raise EngineError(
            "the kernels for CPUs are not compiled",
            remedy=_REMEDY,
        )
    try:
        native = ctypes.CDLL(str(file))
    except OSError as problem:
        raise EngineError(f"does not load: {problem}", file=file, remedy=_REMEDY) from problem
    if getattr(native, "edge_cpu_version", int)() != VERSION:
        raise EngineError(
            "was compiled from other sources than these",
            file=file,
            remedy="run pip install again; in a checkout, make chat does",
        )
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    native.edge_cpu_sets.argtypes = (text, ctypes.c_int)
    native.edge_cpu_pool.restype = pointer
    native.edge_cpu_pool.argtypes = (ctypes.c_int, ctypes.c_int)
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
    """Those that this machine has and kernels are compiled for, the best one last."""
    buffer = ctypes.create_string_buffer(_MESSAGE)
    library().edge_cpu_sets(buffer, _MESSAGE)
    return tuple(buffer.value.decode().split())


def instruction_set() -> str:
    """The best one, or that which EDGE_CPU_SET names. Raises EngineError: this machine lacks it."""
    here = instruction_sets()
    wanted = os.environ.get(SET_VARIABLE, "")
    if wanted and wanted not in here:
        raise EngineError(
            f"this machine has no {wanted!r}",
            field=SET_VARIABLE,
            remedy=f"choose {', '.join(here)}",
        )
    return wanted or here[-1]


class CpuKernel:
    """A variant's kernel. Raises EngineError: there is none for a CPU."""

    def __init__(self, text: str, name: str) -> None:
        self._library = library()
        problem = ctypes.create_string_buffer(_MESSAGE)
        self.handle = self._library.edge_cpu_kernel(name.encode(), text.encode(), problem, _MESSAGE)
        if not self.handle:
            raise EngineError(problem.value.decode(errors="replace"))

    def read_alike(self, other: CpuKernel) -> None:
        """Read weights as `other` does, which reads the same."""
        self._library.edge_cpu_read_alike(self.handle, other.handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.edge_cpu_kernel_free(self.handle)


def text_of(variant: Variant) -> str:
    """A variant as the library reads it. Raises EngineError: a word that would be read as more."""
    said = [variant.kernel, *variant.arguments, *variant.types, *variant.constants]
    said += [value for value in variant.constants.values() if isinstance(value, str)]
    if wrong := [word for word in said if len(word.split()) != 1 or word != word.strip()]:
        raise EngineError(f"{variant.kernel!r:.60}: {wrong[0]!r:.60} is not one word")
    lines = [f"kernel {variant.kernel}"]
    lines += [f"argument {n} {t}" for n, t in zip(variant.arguments, variant.types, strict=True)]
    for name, value in variant.constants.items():
        shown = "" if value is None else str(int(value) if isinstance(value, bool) else value)
        lines.append(f"constant {name} {shown}".rstrip())
    return "\n".join(lines)
