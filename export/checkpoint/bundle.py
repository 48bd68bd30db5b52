"""Read a bundle with fp32 or fp16 weights as the checkpoint it was made from.

A graph stores weights as the runtime needs them: transposed, joined, padded, A in place of A_log.
This is undone here (`edge.export.mixers`). Only A_log may differ from the checkpoint's, by the
rounding of exp and log.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor

from edge.bundle import Bundle, TokenizerInfo, open_bundle
from edge.config import ModelConfig
from edge.errors import CheckpointError
from edge.export.checkpoint.checkpoint import Checkpoint
from edge.export.checkpoint.layout import Layout, Shape, TensorPlace
from edge.export.checkpoint.weights import CheckpointWeights, TensorHeader, WeightFile
from edge.export.mixers import mixer_of
from edge.export.mixers.base import Stored
from edge.tensors import tensor_shapes

Array = NDArray[Any]
FLOATING = ("fp32", "fp16")
_TYPES: dict[int, tuple[torch.dtype, np.dtype[Any]]] = {
    TensorProto.FLOAT: (torch.float32, np.dtype("<f4")),
    TensorProto.FLOAT16: (torch.float16, np.dtype("<f2")),
}
_REMEDY = "start from the checkpoint, or from a bundle exported with --quant fp32 or fp16"


def is_bundle(directory: Path) -> bool:
    """Return whether a directory is a bundle rather than a checkpoint."""
    return (directory / "manifest.json").is_file() and not (directory / "config.json").exists()


class BundleCheckpoint(Checkpoint):
    """A bundle's weights under canonical names, with its tokenizer and text settings.

    Attributes:
        manifest: the bundle's manifest.
    """

    def __init__(self, directory: Path) -> None:
        """Open the bundle and check all its files.

        Raises BundleError when it is damaged or altered; CheckpointError when its weights are not
        floating, or do not fit its model.
        """
        with open_bundle(directory) as bundle:
            manifest = bundle.manifest
            rounded = any(not name.endswith("_cache") for name in manifest.state_dtypes)
            if manifest.quantization.recipe not in FLOATING or rounded:
                raise CheckpointError(
                    f"its weights are stored as {manifest.quantization.recipe}, which has lost "
                    "what another recipe needs",
                    file=directory / "manifest.json",
                    field="quantization.recipe",
                    remedy=_REMEDY,
                )
            bundle.verify()
            config = manifest.model
            pieces = {name: TensorPlace(name, s, s) for name, s in tensor_shapes(config).items()}
            weights = CheckpointWeights()
            weights.add(StoredWeights(bundle))
            super().__init__(
                directory,
                manifest.provenance.family,
                config.model_dump(mode="json"),
                Layout(config, pieces),
                weights,
            )
            self.manifest = manifest
            self.tokenizer_files = _tokenizer_files(bundle)
            self.generation = _special_tokens(manifest.tokenizer)
            self._fingerprint = bundle.fingerprint

    def fingerprint(self) -> str:
        """Return the bundle's fingerprint, which pins all its bytes; the checkpoint's is in
        `manifest.provenance`."""
        return self._fingerprint


def _tokenizer_files(bundle: Bundle) -> list[Path]:
    manifest = bundle.manifest
    file = manifest.tokenizer.file
    settings = None if file is None else f"{Path(file).parent}/tokenizer_config.json"
    names = [name for name in (file, settings, manifest.chat_template) if name is not None]
    return [bundle.path / name for name in names if manifest.entry(name) is not None]


def _special_tokens(info: TokenizerInfo) -> dict[str, Any]:
    """Return the special tokens in the form of `Checkpoint.generation`."""
    tokens: dict[str, Any] = {"bos_token_id": info.bos, "pad_token_id": info.pad}
    if info.eos:
        tokens["eos_token_ids"] = list(info.eos)
    return {name: value for name, value in tokens.items() if value is not None}


class StoredWeights(WeightFile):
    """The weight file of a bundle by canonical names; tensors are restored one at a time."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        graph = manifest.graphs.get("ort")
        if graph is None:
            raise CheckpointError(
                "has no graph for ONNX Runtime to take weights from",
                file=bundle.path / "manifest.json", field="graphs.ort", remedy=_REMEDY,
            )  # fmt: skip
        self._graph = bundle.path / graph
        self._initializers = {
            t.name: t for t in _parse(self._graph, bundle.read(graph)).graph.initializer
        }
        self._location = _location(self._graph, self._initializers["embedding.weight"])
        self.path = bundle.path / self._location
        # mapped through the descriptor that was checked
        self._data = mmap.mmap(bundle.fd(self._location), 0, access=mmap.ACCESS_READ)
        self._stored = stored_as(manifest.model)
        shapes = tensor_shapes(manifest.model)
        self.entries = {
            name: self._entry(stored, shapes[name])
            for name, stored in self._stored.items()
            if stored.name in self._initializers
        }

    def _entry(self, stored: Stored, shape: Shape) -> TensorHeader:
        tensor = self._initializers[stored.name]
        dims = tuple(tensor.dims)
        dtype = _TYPES[tensor.data_type][0] if tensor.data_type in _TYPES else None
        type_name = f"ONNX type {tensor.data_type}"
        return TensorHeader(self._graph, shape if dims == stored.shape else dims, dtype, type_name)

    def read(self, name: str) -> Tensor:
        stored = self._stored[name]
        array = stored.restore(self._array(self._initializers[stored.name]))
        return torch.from_numpy(np.ascontiguousarray(array))

    def _array(self, tensor: TensorProto) -> Array:
        _, dtype = _TYPES[tensor.data_type]
        if _location(self._graph, tensor) != self._location:
            raise CheckpointError("is stored in another file", file=self._graph, field=tensor.name)
        external = {entry.key: entry.value for entry in tensor.external_data}
        count, length = prod(tensor.dims), external.get("length", "")
        offset = external.get("offset", "0")
        fits = offset.isdecimal() and length == str(count * dtype.itemsize)
        if not fits or int(offset) + int(length) > len(self._data):
            raise CheckpointError(
                f"{offset}+{length} is not a range of {self.path.name} that holds {count} values "
                f"of {dtype.itemsize} bytes", file=self._graph, field=tensor.name,
            )  # fmt: skip
        flat = np.frombuffer(self._data, dtype, count, int(offset))
        # copy, because the mapping is read-only and torch requires writable memory
        return flat.reshape(tuple(tensor.dims)).copy()


def _parse(file: Path, graph: bytes) -> onnx.ModelProto:
    try:
        model = onnx.load_from_string(graph)
    except Exception as problem:  # protobuf's exception types vary by version
        raise CheckpointError(f"not an ONNX graph: {problem}", file=file) from None
    if "embedding.weight" not in {tensor.name for tensor in model.graph.initializer}:
        raise CheckpointError("lacks this weight", file=file, field="embedding.weight")
    return model


def _location(file: Path, tensor: TensorProto) -> str:
    external = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location != TensorProto.EXTERNAL or "location" not in external:
        raise CheckpointError("is not kept in a weight file", file=file, field=tensor.name)
    return external["location"]


def stored_as(config: ModelConfig) -> dict[str, Stored]:
    """Return canonical name → how a floating graph stores the tensor."""
    stored = {}
    for name, shape in tensor_shapes(config).items():
        parts = name.split(".", 2)
        changed = None
        if parts[0] == "layers":
            changed = mixer_of(config.layers[int(parts[1])]).stored(parts[2], shape)
        if changed is None:
            stored[name] = Stored(name, shape, lambda array: array)
        else:
            stored[name] = replace(changed, name=f"layers.{parts[1]}.{changed.name}")
    return stored
