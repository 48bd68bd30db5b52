"""Muon for the matrices inside layers, AdamW for everything else, and the learning-rate schedule.

Muon (Jordan, 2024), its update scaled to AdamW's size (Moonlight, arXiv 2502.16982, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from edge.export.network import Network

MUON_LR, MUON_DECAY = 6e-3, 0.1
ADAM_LR = 4e-3


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
