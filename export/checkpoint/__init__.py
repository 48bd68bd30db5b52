"""Read published checkpoints as a `ModelConfig` and canonical tensors.

    checkpoint = open_checkpoint("mamba-130m")
    for name, tensor in checkpoint.tensors(): ...

No code in a checkpoint is run. Opening it reads only headers; tensors are read on demand. A bundle
with floating weights, or a GGUF file, can take the place of the checkpoint it was made from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import NoReturn

from edge.errors import CheckpointError, some
from edge.export.checkpoint import families
from edge.export.checkpoint.bundle import BundleCheckpoint, is_bundle
from edge.export.checkpoint.checkpoint import Checkpoint, config_file
from edge.export.checkpoint.family import Family
from edge.export.checkpoint.fields import Fields, read_json, show
from edge.export.checkpoint.gguf import GgufCheckpoint, GgufFile, GgufModel, find_gguf
from edge.export.checkpoint.known import UNREAD
from edge.export.checkpoint.layout import Layout
from edge.export.checkpoint.weights import open_weights

__all__ = ["FAMILIES", "Checkpoint", "Family", "find_layout", "open_checkpoint", "read_layout"]

FAMILIES = families.every()
_FAMILIES_HINT = "docs/use/models.md lists the families, under Families"


def open_checkpoint(
    path: str | PathLike[str], families: Sequence[Family] = FAMILIES, *, strict: bool = False
) -> Checkpoint:
    """Open a checkpoint directory, GGUF file or bundle, and check the config and tensor headers.

    Unknown fields of config.json are listed in `unknown_fields`, or refused with `strict`.

    Raises CheckpointError when the directory is not a checkpoint of a known family, when a file is
    damaged or would run code, and when tensors are missing, unused, or of the wrong shape or dtype,
    listing all of them. For a bundle, raises CheckpointError when its weights are not floating, and
    BundleError when it is damaged.
    """
    directory = Path(path)
    if (file := find_gguf(directory)) is not None:
        model = GgufModel(GgufFile(file))
        family, layout = find_layout(model.fields, families)
        return GgufCheckpoint(model, family, layout)
    remedy = "give the directory with config.json in it, or a .gguf file"
    if not directory.is_dir():
        what = "is not a directory" if os.path.lexists(directory) else "does not exist"
        raise CheckpointError(what, file=directory, remedy=remedy)
    if is_bundle(directory):
        return BundleCheckpoint(directory)
    file = config_file(directory)
    if not os.path.lexists(file):
        raise CheckpointError("has no config.json", file=directory, remedy=remedy)
    fields, family, layout = _read_config(file, families)
    unknown = tuple(fields.unknown)
    if strict and unknown:
        raise CheckpointError(
            unknown_line(unknown), file=file, field=unknown[0],
            remedy="remove those that do not change the model, or omit --strict",
        )  # fmt: skip
    checkpoint = Checkpoint(directory, family, fields.values, layout, open_weights(directory))
    checkpoint.unknown_fields = unknown
    return checkpoint


def read_layout(path: Path) -> tuple[Layout, list[str]]:
    """Return the layout that a config, a checkpoint folder or a GGUF file describes, and the
    unknown fields.

    Weights need not be present. Raises CheckpointError when the description is invalid.
    """
    if (file := find_gguf(path)) is not None:
        return find_layout(GgufModel(GgufFile(file)).fields)[1], []
    fields, _, layout = _read_config(config_file(path) if path.is_dir() else path, FAMILIES)
    return layout, fields.unknown


def _read_config(file: Path, families: Sequence[Family]) -> tuple[Fields, str, Layout]:
    fields = Fields(file, read_json(file))
    return fields, *find_layout(fields, families)


def unknown_line(names: Sequence[str]) -> str:
    """Return a sentence that lists unknown fields."""
    plural = "s" if names[1:] else ""
    return f"config.json has {len(names)} unknown field{plural}: {some(names, 20)}"


def find_layout(fields: Fields, families: Sequence[Family] = FAMILIES) -> tuple[str, Layout]:
    """Return the family that a config.json belongs to, and the layout of the model's tensors.

    Raises CheckpointError when no family reads it, or when a field is bad.
    """
    family = next((f for f in families if f.claims(fields)), None)
    if family is None:
        _refuse_unclaimed(fields, families)
    layout = family.read(fields)
    fields.check()
    return family.name, layout


def _refuse_unclaimed(fields: Fields, families: Sequence[Family]) -> NoReturn:
    """Raise CheckpointError for a config of no family, naming it or families spelt alike."""
    model_type = fields.values.get("model_type")
    if model_type is None:
        classes = fields.values.get("architectures")
        note = "" if classes is None else f", and architectures is {show(classes)}"
        fields.stop("model_type", f"is missing{note}: of no known family", _FAMILIES_HINT)
    if isinstance(model_type, str) and model_type in UNREAD:
        message = f"is {show(model_type)}: {UNREAD[model_type]}, a family that edge does not read"
        fields.stop("model_type", message, _FAMILIES_HINT)
    accepted = {family.name: family.accepts for family in families}
    normalized = re.sub(r"\W", "_", str(model_type)[:80].lower())
    similar = [accepted[name] for name in get_close_matches(normalized, accepted, 3, 0.7)]
    remedy = f"similar: {'; '.join(similar)}. {_FAMILIES_HINT}" if similar else _FAMILIES_HINT
    fields.stop("model_type", f"is {show(model_type)}, of no known family", remedy)
