"""weights.bin: every tensor of a graph in one file, written one after the other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

ALIGNMENT = 64
PAGE = 4096
# Tensors at least this large start on a page, so that they can be mapped one by one.
_LARGE = 1 << 20
_SLICE = 1 << 24

Array = NDArray[Any]


class WeightFile:
    """Appends tensors to a file and hands back the ONNX initializers that point into it.

    The bytes depend on the tensors and their order alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def __enter__(self) -> WeightFile:
        self._file = self.path.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def add(self, name: str, array: Array) -> TensorProto:
        """Append `array` little-endian and in C order; return its external initializer."""
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        self._write(b"\0" * (-self.size % (PAGE if array.nbytes >= _LARGE else ALIGNMENT)))
        offset = self.size
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _SLICE):
            self._write(flat[start : start + _SLICE].data)
        tensor = TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=TensorProto.EXTERNAL,
        )
        where = {"location": self.path.name, "offset": offset, "length": array.nbytes}
        for key, entry in where.items():
            tensor.external_data.add(key=key, value=str(entry))
        return tensor

    def _write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)
