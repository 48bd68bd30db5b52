"""Open weight files without reading their tensors and without running code in them."""

from __future__ import annotations

import pickle
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from edge.errors import CheckpointError
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.torch_pickle import DOWNLOAD, check_torch_file

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TensorHeader:
    """A stored tensor's header. `dtype` is None unless it is fp32, fp16 or bf16."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    stored_dtype: str


class WeightFile(ABC):
    """One file of named tensors: headers in memory, tensors read on demand."""

    path: Path
    entries: dict[str, TensorHeader]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, on the CPU."""


class SafetensorsFile(WeightFile):
    """A safetensors file. Raises CheckpointError if its header is malformed or it is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            self.entries = {name: self._entry(name) for name in self._file.keys()}  # noqa: SIM118
        except MemoryError:
            raise CheckpointError(
                f"has {path.stat().st_size} bytes, which this process may not map",
                file=path, remedy="raise its limit of address space: ulimit -v unlimited",
            ) from None  # fmt: skip
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"damaged or cut short: {error}", file=path, remedy=DOWNLOAD
            ) from error

    def _entry(self, name: str) -> TensorHeader:
        header = self._file.get_slice(name)
        dtype = header.get_dtype()
        return TensorHeader(self.path, tuple(header.get_shape()), DTYPES.get(dtype), dtype)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class TorchFile(WeightFile):
    """A `torch.save`d dict of tensors, mapped into memory, its pickle restricted to tensors.

    Raises CheckpointError when the file is cut short, holds anything but named tensors, or would
    run code when unpickled.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_torch_file(path)
        self._tensors = self._load(path)
        self.entries = {}
        for name, tensor in self._tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"holds a {type(tensor).__name__}, not a tensor",
                    file=path, field=str(name), remedy="save the model's state_dict() only",
                )  # fmt: skip
            if tensor.layout == torch.strided:
                stored_bytes = tensor.untyped_storage().nbytes()
                if tensor.numel() * tensor.element_size() > stored_bytes:
                    raise CheckpointError(
                        f"is {list(tensor.shape)} of {stored_bytes} bytes, which repeat",
                        file=path, field=str(name), remedy="save it with .contiguous()",
                    )  # fmt: skip
            plain = tensor.layout == torch.strided and tensor.dtype in DTYPES.values()
            stored = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            self.entries[name] = TensorHeader(path, shape, tensor.dtype if plain else None, stored)

    @staticmethod
    def _load(path: Path) -> dict[Any, Any]:
        try:
            # files of torch < 1.6 are not zip archives and cannot be mapped
            mapped = zipfile.is_zipfile(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL (\S+)", str(error))
            what = f"refers to {match.group(1)}" if match else "is not a plain pickle of tensors"
            raise CheckpointError(
                f"{what}, which could run code; nothing was run",
                file=path, remedy="use a safetensors file from a source you trust",
            ) from error  # fmt: skip
        except Exception as error:
            # damaged bytes make torch's reader raise almost any exception
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"damaged or cut short: {first[:200]}", file=path, remedy=DOWNLOAD
            ) from error
        if not isinstance(loaded, dict):
            raise CheckpointError(
                f"holds a {type(loaded).__name__}, not named tensors",
                file=path, remedy="save the model's state_dict() only",
            )  # fmt: skip
        return loaded

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name].detach()
        return tensor


class CheckpointWeights:
    """All tensors of a checkpoint, in one file or several.

    Attributes:
        files: files opened, index files included, in order of their names.
        entries: stored name → header.
        missing: names that an index lists but its shard lacks.
    """

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.entries: dict[str, TensorHeader] = {}
        self.missing: list[str] = []
        self._file_of: dict[str, WeightFile] = {}

    def add(self, file: WeightFile, names: list[str] | None = None) -> None:
        """Take the named tensors of a file, by default all of them."""
        self.files.append(file.path)
        for name in file.entries if names is None else names:
            if name in file.entries:
                self.entries[name] = file.entries[name]
                self._file_of[name] = file
            else:
                self.missing.append(name)

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, on the CPU. It may be mapped from its file, so do not write
        to it."""
        return self._file_of[name].read(name)


def open_weights(directory: Path) -> CheckpointWeights:
    """Open the weights of a checkpoint directory; safetensors are preferred to pickles.

    Raises CheckpointError when there are none, or when a file or an index is damaged.
    """
    kinds: list[tuple[str, Callable[[Path], WeightFile]]] = [
        ("model.safetensors", SafetensorsFile),
        ("pytorch_model.bin", TorchFile),
        ("consolidated.safetensors", SafetensorsFile),
    ]
    for name, kind in kinds:
        for path in (directory / name, directory / f"{name}.index.json"):
            if path.exists() or path.is_symlink():
                return _open_file(path, kind)
    loose = sorted(directory.glob("*.pt"))
    if len(loose) == 1:
        return _open_file(loose[0], TorchFile)
    raise CheckpointError(
        f"no weights: none of {', '.join(n for n, _ in kinds)}, their .index.json, or one .pt file",
        file=directory, remedy="point at the directory that holds the weights",
    )  # fmt: skip


def _open_file(path: Path, kind: Callable[[Path], WeightFile]) -> CheckpointWeights:
    weights = CheckpointWeights()
    _check_regular(path)
    if path.suffix != ".json":
        weights.add(kind(path))
        return weights
    shards = _read_index(path)
    for name in sorted(shards):
        _check_regular(path.parent / name, index=path)
    weights.files.append(path)
    for name, tensors in sorted(shards.items()):
        weights.add(kind(path.parent / name), tensors)
    weights.files.sort()
    return weights


def _check_regular(path: Path, index: Path | None = None) -> None:
    """Check that a path is a regular file or a link to one, as in the Hugging Face cache."""
    if not path.is_file():
        blame = {"file": index, "field": "weight_map"} if index else {"file": path}
        raise CheckpointError(
            f"{path.name} is missing or is not a regular file", **blame, remedy=DOWNLOAD
        )
    check_pointer(path)


def check_pointer(path: Path) -> None:
    """Raise CheckpointError for a git-lfs pointer, which stands in for a file not yet fetched."""
    with path.open("rb") as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        raise CheckpointError(
            "is a git-lfs pointer, not the file itself", file=path, remedy="run git lfs pull"
        )


def _read_index(path: Path) -> dict[str, list[str]]:
    """Return shard → names of its tensors, as the index lists them."""
    fields = Fields(path, read_json(path))
    shards: dict[str, list[str]] = {}
    weight_map = fields.section("weight_map")
    for tensor, shard in weight_map.values.items():
        if not isinstance(shard, str):
            weight_map.refuse(tensor, "does not name a file")
        # Shards are in the same directory as their index; other paths could read any file.
        elif not shard or shard != Path(shard).name or "\0" in shard or "\\" in shard:
            weight_map.refuse(tensor, f"leads out of the directory: {shard[:80]!r}")
        else:
            shards.setdefault(shard, []).append(tensor)
    if not shards:
        fields.inconsistent("weight_map", "names no tensors")
    fields.check()
    return shards
