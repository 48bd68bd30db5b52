"""The optimizer, its schedule, and checkpoints from which a run continues.

Muon (Jordan, 2024) for the matrices inside layers, its update scaled to AdamW's size (Moonlight,
arXiv 2502.16982, section 2.2); AdamW for everything else.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edge.export.network import Network

MUON_LR, MUON_DECAY = 6e-3, 0.1
ADAM_LR = 4e-3
KEEP = 2  # checkpoints of a run


def initialise(network: Network) -> None:
    """Small embedding (it is also the head), Linear N(0, 0.5/fan_in), outputs scaled by depth."""
    depth = len(network.config.layers)
    with torch.no_grad():
        network.embedding.weight.normal_(std=0.02)
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith(("out_proj", "o_proj", "down_proj"))
                std = math.sqrt(0.5 / module.in_features) / (math.sqrt(depth) if last else 1.0)
                module.weight.normal_(std=std)


class Optimizer:
    """Both optimizers behind one step; its state is tensors, numbers and names only."""

    def __init__(self, network: Network) -> None:
        matrices = [m.weight for m in network.layers.modules() if isinstance(m, nn.Linear)]
        chosen = {id(p) for p in matrices}
        rest = [p for p in network.parameters() if id(p) not in chosen]
        self.parameters: list[Tensor] = [*matrices, *rest]
        self.muon = torch.optim.Muon(
            matrices, lr=MUON_LR, weight_decay=MUON_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, factor: float) -> float:
        """One update at `factor` of the full learning rates; returns the gradient's norm."""
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        pairs: list[tuple[torch.optim.Optimizer, float]]
        pairs = [(self.muon, MUON_LR), (self.adam, ADAM_LR)]
        for optimizer, rate in pairs:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def trapezoid(step: int, progress: float, warmup: int = 100, decay: float = 0.3) -> float:
    """Learning-rate factor: up over `warmup` steps, flat, then linearly to 0 over the last `decay`.

    `progress` is the share of the run that is over, by steps or by the clock.
    """
    up = min(1.0, (step + 1) / warmup)
    return up * min(1.0, max(0.0, (1.0 - progress) / decay))


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
