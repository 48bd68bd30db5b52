"""A checkpoint with outliers, to be exported like the one it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from edge.export.checkpoint import Checkpoint, open_checkpoint
from edge.export.network import Network
from edge.export.outliers.outliers import observe, with_outliers
from edge.export.quantize.texts import checkpoint_reader, read_text
from edge.tensors import tensor_shapes

# A second moment of D inputs needs a few times D rows; 64 × 512 are plenty for what is tried here.
SEQUENCES, LENGTH = 64, 512


class OutlierCheckpoint(Checkpoint):
    """Reads as `Checkpoint` does; its tensors are in memory, in fp32."""

    def __init__(self, path: str | Path, text: Path | None, y_peak: float) -> None:
        """Reads `path`, a checkpoint or a floating bundle, and looks at it on `text`.

        Raises CheckpointError for the one, ExportError for the other and for a model that has no
        room for outliers.
        """
        source = open_checkpoint(path)
        read = read_text(text, checkpoint_reader(source, source.config), SEQUENCES, LENGTH)
        network = Network(source.config).eval()
        tensors = {name: tensor.float() for name, tensor in source.tensors()}
        network.load_canonical(tensors)
        seen = observe(network, torch.from_numpy(read.sequences))
        self.config, self._tensors = with_outliers(source.config, tensors, seen, y_peak)
        self.path, self.family = source.path, source.family
        self.source_config, self.manifest = source.source_config, source.manifest
        self.tokenizer_files, self.generation = source.tokenizer_files, source.generation
        said = f"{source.fingerprint()}\n{read.sha256}\noutliers {y_peak}\n"
        self._fingerprint = hashlib.sha256(said.encode()).hexdigest()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in tensor_shapes(self.config):
            yield name, self._tensors[name]

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def fingerprint(self) -> str:
        """Of what it was made from: the checkpoint, the text and the size of the outliers."""
        return self._fingerprint
