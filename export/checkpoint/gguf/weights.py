"""A GGUF file opened: its metadata, and its tensors dequantized when asked for."""

from __future__ import annotations

import mmap
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
    """What a conversion changed in a tensor, undone.

    Attributes:
        shape: the checkpoint's shape, from the file's.
        values: the checkpoint's values from the file's in fp32, or None where they are the same.
    """

    shape: Callable[[Shape], Shape] = lambda shape: shape
    values: Callable[[Array], Array] | None = None


AS_IT_IS = Restoration()


def package() -> ModuleType:
    """The package `gguf`, which knows the quantized types. Raises CheckpointError without it."""
    try:
        import gguf
    except ModuleNotFoundError as missing:
        raise CheckpointError(
            f"reading GGUF needs the package {missing.name}",
            remedy="pip install 'mamba-edge[export]'",
        ) from None
    return gguf


class GgufFile(WeightFile):
    """A GGUF file: tensors by their names there, as the checkpoint had them before conversion.

    Attributes:
        metadata: key → value, as the file has it.
        tensors: name → place.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError: damaged, cut short, or of unknown types."""
        self.path = path
        self._gguf = package()
        kinds = self._gguf.GGML_QUANT_SIZES
        try:
            with path.open("rb") as file:
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
        """Tell what of each tensor is to be undone; without it they are as the file has them."""
        self._restorations = {name: how(name) for name in self.tensors}
        self.entries = {name: self._entry(name) for name in self.tensors}

    def _entry(self, name: str) -> TensorHeader:
        place, undone = self.tensors[name], self._restorations[name]
        named = self._named(place)
        dtype = _PLAIN.get(named) or (torch.float32 if self._can_read(place) else None)
        if undone.values is not None and dtype is not None:
            dtype = torch.float32
        return TensorHeader(self.path, undone.shape(place.shape), dtype, named)

    def _named(self, place: GgufTensor) -> str:
        return str(self._gguf.GGMLQuantizationType(place.kind).name)

    def _can_read(self, place: GgufTensor) -> bool:
        """Whether values of the type are floating, and the package dequantizes them."""
        if self._named(place) in ("F64", "I8", "I16", "I32", "I64"):
            return False
        _, size = self._gguf.GGML_QUANT_SIZES[self._gguf.GGMLQuantizationType(place.kind)]
        try:
            self._dequantize(np.zeros((1, size), np.uint8), place.kind)
        except NotImplementedError:  # so the package says that it knows no such type
            return False
        return True

    def _dequantize(self, rows: Array, kind: int) -> Array:
        with np.errstate(all="ignore"):  # whatever is not finite is found by who reads it
            values: Array = self._gguf.quants.dequantize(
                rows, self._gguf.GGMLQuantizationType(kind)
            )
        return values

    def read(self, name: str) -> Tensor:
        place, undone = self.tensors[name], self._restorations[name]
        tensor = self._values(place)
        if undone.values is not None:
            with np.errstate(all="ignore"):
                array = undone.values(tensor.float().numpy())
            tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.reshape(undone.shape(place.shape))

    def _values(self, place: GgufTensor) -> Tensor:
        raw = np.frombuffer(self._data, np.uint8, place.size, place.offset)
        plain = _PLAIN.get(self._named(place))
        if plain is not None:
            # a copy: what is mapped may not be written to, and torch wants to be able to
            return torch.from_numpy(raw.copy()).view(plain).reshape(place.shape)
        rows = raw.reshape(*place.shape[:-1], -1)
        return torch.from_numpy(self._dequantize(rows, place.kind)).reshape(place.shape)
