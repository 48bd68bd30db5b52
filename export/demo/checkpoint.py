"""What a run needs to continue, written so that a crash at any moment leaves a whole one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from edge.export.demo.optim import Optimizer
from edge.export.network import Network

KEEP = 2


def fsync_tree(folder: Path) -> None:
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def replace_folder(temporary: Path, final: Path) -> None:
    """Put a finished folder in place of an older one; the older one is gone only afterwards."""
    fsync_tree(temporary)
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _complete(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if (p / "progress.json").exists())


def save(folder: Path, network: Network, optimizer: Optimizer, progress: dict[str, Any]) -> None:
    """folder/step-N: weights.safetensors, optimizer.pt (tensors and numbers), progress.json."""
    name = f"step-{progress['step']:08d}"
    temporary = folder / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: p.detach().contiguous() for name, p in network.named_parameters()}
    save_file(weights, temporary / "weights.safetensors")
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    (temporary / "progress.json").write_text(json.dumps(progress, indent=2) + "\n")
    fsync_tree(temporary)
    shutil.rmtree(folder / name, ignore_errors=True)
    temporary.rename(folder / name)
    for old in _complete(folder)[:-KEEP]:
        shutil.rmtree(old)


def load(folder: Path, network: Network, optimizer: Optimizer) -> dict[str, Any] | None:
    """Continue from the newest whole checkpoint; None where there is none."""
    found = _complete(folder)
    if not found:
        return None
    device = network.embedding.weight.device
    network.load_state_dict(load_file(found[-1] / "weights.safetensors", device=str(device)))
    optimizer.load_state_dict(
        torch.load(found[-1] / "optimizer.pt", map_location=device, weights_only=True)
    )
    progress: dict[str, Any] = json.loads((found[-1] / "progress.json").read_text())
    return progress
