"""Checkpoints from which a run continues: weights, optimizer and progress.

    step-N/         weights.safetensors, optimizer.pt (tensors and numbers), progress.json, and
                    sums.json: SHA-256 of the other three
    .step-N.tmp/    being written; the next save removes one that a killed run left

Every byte is checked before a run continues from a checkpoint. A damaged checkpoint is skipped for
the one before it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edge.bundle.files import sha256
from edge.errors import ExportError
from edge.export.distill.folders import sync_tree
from edge.export.distill.optimizer import Optimizer
from edge.replace import sync

KEEP = 2  # newest checkpoints to keep
WEIGHTS, OPTIMIZER, PROGRESS, SUMS = (
    "weights.safetensors", "optimizer.pt", "progress.json", "sums.json",
)  # fmt: skip


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint whose every byte has been checked.

    Attributes:
        progress: progress it was saved with.
    """

    folder: Path
    progress: dict[str, Any]

    def load(self, weights: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """Load the checkpoint into `weights` and the optimizer."""
        tensors = load_file(self.folder / WEIGHTS)
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(tensors[name])
        # AdamW counts its steps on the CPU; the rest of the state goes where the parameters are
        state = torch.load(self.folder / OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state)


def save(
    folder: Path, weights: Mapping[str, Tensor], optimizer: Optimizer, progress: dict[str, Any]
) -> None:
    """Add a checkpoint to `folder` and keep the one before it. Raises OSError or SafetensorError
    when it cannot be written; earlier checkpoints then stay.
    """
    name = f"step-{progress['step']:08d}"
    temporary = folder / f".{name}.tmp"
    for stale in folder.glob(".step-*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
        save_file(tensors, temporary / WEIGHTS)
        _save_tensors(temporary / OPTIMIZER, optimizer.state_dict())
        (temporary / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n")
        sums = {file: _file_sha256(temporary / file) for file in (WEIGHTS, OPTIMIZER, PROGRESS)}
        (temporary / SUMS).write_text(json.dumps(sums, indent=2) + "\n")
        sync_tree(temporary)
        shutil.rmtree(folder / name, ignore_errors=True)
        temporary.rename(folder / name)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    checkpoints = _checkpoints(folder)
    # later checkpoints are damaged, or the run would have continued from there
    newer = [checkpoint for checkpoint in checkpoints if checkpoint.name > name]
    current = [checkpoint for checkpoint in checkpoints if checkpoint.name <= name]
    for old in [*newer, *current[:-KEEP]]:
        shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path, report: Callable[[str], None]) -> WholeCheckpoint | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints. Damaged ones are
    reported. Raises ExportError when all are damaged.
    """
    damaged = []
    for checkpoint in reversed(_checkpoints(folder)):
        try:
            return WholeCheckpoint(checkpoint, _verify(checkpoint))
        except ExportError as problem:
            damaged.append(problem)
            report(f"skipped: {problem}")
    if damaged:
        raise ExportError(
            damaged[0].message, file=damaged[0].file,
            remedy=f"no other checkpoint is intact; to start over, remove {folder.parent}",
        )  # fmt: skip
    return None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _verify(folder: Path) -> dict[str, Any]:
    """Check a checkpoint and return its progress. Raises ExportError when a file is missing or
    altered."""
    try:
        sums = json.loads((folder / SUMS).read_bytes())
        for name in (WEIGHTS, OPTIMIZER, PROGRESS):
            if sums[name] != _file_sha256(folder / name):
                raise ExportError("does not match its SHA-256", file=folder / name)
        progress: object = json.loads((folder / PROGRESS).read_bytes())
        if not isinstance(progress, dict):
            raise TypeError("the progress is not an object")
    except OSError as problem:
        raise ExportError(
            f"cannot be read: {problem.strerror}", file=problem.filename or folder
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ExportError(
            f"is damaged: {SUMS} or {PROGRESS} is not what a run writes", file=folder
        ) from None
    return progress


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return sha256(stream.fileno(), os.fstat(stream.fileno()).st_size)


class _ErrorKeepingFile(io.BufferedWriter):
    """A file for torch.save that keeps the OSError of a full disk, which torch.save would hide."""

    problem: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as problem:
            self.problem = problem
            raise


def _save_tensors(path: Path, values: dict[str, Any]) -> None:
    with _ErrorKeepingFile(io.FileIO(path, "wb")) as stream:
        try:
            torch.save(values, stream)
        except RuntimeError:
            if stream.problem is None:
                raise
            raise stream.problem from None
