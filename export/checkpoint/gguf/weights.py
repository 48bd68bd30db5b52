"""An open GGUF file: its metadata, and its tensors, dequantized on demand."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.errors import CheckpointError
from edge.export.checkpoint.gguf.header import GgufTensor, read_header
from edge.export.checkpoint.weights import TensorHeader, WeightFile, check_pointer

Array = NDArray[Any]
Shape = tuple[int, ...]
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Restoration:
    """How to undo a conversion's changes to a tensor.

    Attributes:
        shape: function from the file's shape to the checkpoint's.
        values: function from the file's values in fp32 to the checkpoint's; None if unchanged.
    """

    shape: Callable[[Shape], Shape] = lambda shape: shape
    values: Callable[[Array], Array] | None = None


AS_IT_IS = Restoration()


def package() -> ModuleType:
    """Import the package `gguf`, which dequantizes. Raises CheckpointError if it is missing."""
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise CheckpointError(
            f"reading GGUF needs the package {missing.name}",
            remedy="pip install 'mamba-edge[export]'",
        ) from None
    return gguf


class GgufFile(WeightFile):
    """A GGUF file: tensors by the file's names, with the values they had before conversion.

    Attributes:
        metadata: key → value, unchanged.
        tensors: name → place.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises CheckpointError if it is damaged, cut short, or of unknown types."""
        self.path = path
        self._gguf = package()
        kinds = self._gguf.GGML_QUANT_SIZES
        try:
            # O_NONBLOCK: a pipe put in its place must not block
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError("it is not a regular file")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:  # ValueError: it is empty
            raise CheckpointError(
                f"cannot be read: {problem}", file=path, remedy="check the file and the disk"
            ) from None
        check_pointer(path)
        sizes = {int(kind): size for kind, size in kinds.items()}
        header = read_header(path, self._data, sizes)
        self.metadata, self.tensors = header.metadata, header.tensors
        self.restore(lambda name: AS_IT_IS)

    def restore(self, how: Callable[[str], Restoration]) -> None:
        """Set how to restore each tensor; by default tensors are as in the file."""
        self._restorations = {name: how(name) for name in self.tensors}
        self.entries = {name: self._entry(name) for name in self.tensors}

    def _entry(self, name: str) -> TensorHeader:
        place, restoration = self.tensors[name], self._restorations[name]
        type_name = self._type_name(place)
        dtype = _PLAIN.get(type_name) or (torch.float32 if self._can_read(place) else None)
        if restoration.values is not None and dtype is not None:
            dtype = torch.float32
        return TensorHeader(self.path, restoration.shape(place.shape), dtype, type_name)

    def _type_name(self, place: GgufTensor) -> str:
        return str(self._gguf.GGMLQuantizationType(place.kind).name)

    def _can_read(self, place: GgufTensor) -> bool:
        """Return whether the type is floating-point and the package can dequantize it."""
        if self._type_name(place) in ("F64", "I8", "I16", "I32", "I64"):
            return False
        _, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(place.kind)]
        try:
            self._dequantize(np.zeros((1, size), np.uint8), place.kind)
        except NotImplementedError:  # how gguf says that it has no reader of this type
            return False
        return True

    def _dequantize(self, rows: Array, kind: int) -> Array:
        with np.errstate(all="ignore"):  # the caller checks for NaN and infinity
            values: Array = self._gguf.quants.dequantize(
                rows, self._gguf.GGMLQuantizationType(kind)
            )
        return values

    def read(self, name: str) -> Tensor:
        place, restoration = self.tensors[name], self._restorations[name]
        tensor = self._values(place)
        if restoration.values is not None:
            with np.errstate(all="ignore"):
                array = restoration.values(tensor.float().numpy())
            tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.reshape(restoration.shape(place.shape))

    def _values(self, place: GgufTensor) -> Tensor:
        raw = np.frombuffer(self._data, np.uint8, place.size, place.offset)
        plain = _PLAIN.get(self._type_name(place))
        if plain is not None:
            # copy, because the mapping is read-only and torch requires writable memory
            return torch.from_numpy(raw.copy()).view(plain).reshape(place.shape)
        rows = raw.reshape(*place.shape[:-1], -1)
        return torch.from_numpy(self._dequantize(rows, place.kind)).reshape(place.shape)
