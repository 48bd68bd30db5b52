"""Copies of a state's slots on the device of an ONNX Runtime provider.

Runs read and write the copies, so a state does not travel with every token. Everything else works
on the arrays in this process's memory, and slots are copied one by one where one side needs what
the other wrote last.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import (  # type: ignore[import-untyped]
    OrtDevice,
    OrtValue,
)

from edge.errors import StateError
from edge.runtime.state_memory import Array


class Span(NamedTuple):
    """Slots of adjacent tensors, as slices."""

    tensors: slice
    slots: slice


class DeviceSlots:
    """The device's copies of some tensors [slots, …], and which side has each slot's newest value.

    Attributes:
        device: the device that the copies are on.
        names: the tensors, in the order that a `Span` counts them in.
    """

    def __init__(self, arrays: Mapping[str, Array], device: OrtDevice) -> None:
        """Allocate the copies; the arrays are newer at first. Raises StateError."""
        self.device = device
        self.names = tuple(arrays)
        self._arrays = arrays
        self._rows = {name: row for row, name in enumerate(arrays)}
        size = len(arrays), max((len(array) for array in arrays.values()), default=0)
        self._newer_here, self._newer_there = np.ones(size, np.bool_), np.zeros(size, np.bool_)
        try:
            self._copies = {
                name: OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, device)
                for name, array in arrays.items()
            }
        except Exception as problem:
            total = sum(array.nbytes for array in arrays.values())
            raise StateError(
                f"cannot allocate a state of {total} bytes on the GPU: {problem}",
                remedy="make window or batch smaller, or choose --provider cpu",
            ) from problem

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def view(self, name: str, start: int, count: int | None = None) -> OrtValue:
        """Return the copy of array[start] or array[start : start + count].

        The caller keeps this `DeviceSlots` alive, which owns the memory.
        """
        slot = self._arrays[name].shape[1:]
        shape = slot if count is None else (count, *slot)
        offset = start * math.prod(slot) * self._arrays[name].itemsize
        return _part(self._copies[name], offset, shape)

    def fetch(self, name: str, slot: int) -> None:
        """Bring a slot of the array up to date, before it is read."""
        row = self._rows[name]
        if self._newer_there[row, slot]:
            self._arrays[name][slot] = self.view(name, slot).numpy()
            self._newer_there[row, slot] = False

    def replace(self, name: str, slot: int) -> None:
        """Note that a slot of the array is overwritten."""
        row = self._rows[name]
        self._newer_here[row, slot], self._newer_there[row, slot] = True, False

    def prepare(self, read: Sequence[Span], written: Sequence[Span]) -> None:
        """Bring what a run reads up to date on the device, and note what it writes."""
        for span in read:
            newer = self._newer_here[span]
            if newer.any():
                for row, slot in np.argwhere(newer).tolist():
                    name, at = self.names[span.tensors.start + row], span.slots.start + slot
                    self.view(name, at).update_inplace(self._arrays[name][at])
                newer[...] = False
        for span in written:
            self._newer_here[span], self._newer_there[span] = False, True


class _Tensor(ctypes.Structure):
    """DLPack's DLManagedTensor. `device` and `dtype` are copied as they are."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device", ctypes.c_int64), ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )  # fmt: skip


_CAPSULE = b"dltensor"
_python = ctypes.pythonapi
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_c: Any = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
_c.malloc.argtypes, _c.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p


def _part(whole: OrtValue, offset: int, shape: Sequence[int]) -> OrtValue:
    """Return the tensor of this shape that lies `offset` bytes into the memory of `whole`.

    ONNX Runtime accepts an address on a device only in an IOBinding or by DLPack. It frees the
    description below through its `deleter`; a function of Python's could be gone by then.
    """
    capsule = whole.to_dlpack()  # kept until its fields are copied
    source = _Tensor.from_address(_python.PyCapsule_GetPointer(capsule, _CAPSULE))
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    block = _c.malloc(ctypes.sizeof(_Tensor) + ctypes.sizeof(sizes))
    if not block:
        raise MemoryError
    at = block + ctypes.sizeof(_Tensor)
    ctypes.memmove(at, sizes, ctypes.sizeof(sizes))
    part = _Tensor.from_address(block)
    part.data, part.device, part.dtype = whole.data_ptr() + offset, source.device, source.dtype
    part.ndim, part.shape, part.strides, part.byte_offset = len(shape), at, None, 0
    part.context, part.deleter = None, ctypes.cast(_c.free, ctypes.c_void_p)
    return OrtValue.from_dlpack(_python.PyCapsule_New(block, _CAPSULE, None), False)
