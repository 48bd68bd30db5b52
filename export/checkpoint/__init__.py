"""Checkpoints as they are published, read as one `ModelConfig` and canonical tensors.

    checkpoint = open_checkpoint("mamba-130m")
    for name, tensor in checkpoint.tensors(): ...

Nothing in a checkpoint is run, and nothing of it is read before it is asked for but the headers.
A bundle with floating weights stands for the checkpoint it was made from, and so does a GGUF file.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from edge.errors import CheckpointError
from edge.export.checkpoint import families
from edge.export.checkpoint.bundle import BundleCheckpoint, is_bundle
from edge.export.checkpoint.checkpoint import Checkpoint
from edge.export.checkpoint.family import Family
from edge.export.checkpoint.fields import Fields, read_json
from edge.export.checkpoint.gguf import GgufCheckpoint, GgufFile, GgufModel, find_gguf
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.weights import open_weights

__all__ = ["FAMILIES", "Checkpoint", "Family", "find_layout", "open_checkpoint"]

FAMILIES = families.every()


def open_checkpoint(path: str | PathLike[str], families: Sequence[Family] = FAMILIES) -> Checkpoint:
    """Open a checkpoint directory, GGUF file or bundle; config and all tensor headers are checked.

    Raises CheckpointError when the directory is not a checkpoint of a known family, when a file is
    damaged or would run code, and when tensors are missing, unused, of another shape or dtype:
    all of those at once. Of a bundle, when its weights are not floating; BundleError when it is
    damaged.
    """
    directory = Path(path)
    if (file := find_gguf(directory)) is not None:
        model = GgufModel(GgufFile(file))
        family, layout = find_layout(model.fields, families)
        return GgufCheckpoint(model, family, layout)
    if not directory.is_dir():
        raise CheckpointError(
            "is not a directory", file=directory,
            remedy="give the directory with config.json in it, or a .gguf file",
        )  # fmt: skip
    if is_bundle(directory):
        return BundleCheckpoint(directory)
    file = directory / "config.json"
    fields = Fields(file, read_json(file))
    family, layout = find_layout(fields, families)
    return Checkpoint(directory, family, fields.values, layout, open_weights(directory))


def find_layout(fields: Fields, families: Sequence[Family] = FAMILIES) -> tuple[str, Layout]:
    """The family that understands a config.json, and where it keeps the model's tensors.

    Raises CheckpointError: no family does, or a field is bad.
    """
    family = next((f for f in families if f.claims(fields)), None)
    if family is None:
        known = "; ".join(f"{f.name}: {f.accepts}" for f in families)
        named = fields.values.get("model_type") or fields.values.get("architectures")
        fields.stop("model_type", f"names no known architecture: {str(named)[:80]!r}", known)
    layout = family.read(fields)
    fields.check()
    return family.name, layout
