"""The optimizer and its schedule.

Muon (Jordan, 2024) for the matrices inside layers, its update scaled to AdamW's size (Moonlight,
arXiv 2502.16982, section 2.2); AdamW for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edge.export.network import Network

MUON_LR, MUON_DECAY = 6e-3, 0.1
ADAM_LR = 4e-3


@dataclass(frozen=True)
class Rates:
    """Full learning rates, Muon's for matrices and AdamW's for the rest, and Muon's decay."""

    muon: float = MUON_LR
    adam: float = ADAM_LR
    decay: float = MUON_DECAY

    def times(self, factor: float) -> Rates:
        """Return both rates multiplied by `factor`, with the same decay."""
        return Rates(self.muon * factor, self.adam * factor, self.decay)


def initialise(network: Network) -> None:
    """Initialise: small embedding (it is also the head), Linear N(0, 0.5/fan_in), outputs scaled by
    depth."""
    depth = len(network.config.layers)
    with torch.no_grad():
        network.embedding.weight.normal_(std=0.02)
        for name, module in network.named_modules():
            if isinstance(module, nn.Linear):
                is_output = name.endswith(("out_proj", "o_proj", "down_proj"))
                std = math.sqrt(0.5 / module.in_features) / (math.sqrt(depth) if is_output else 1.0)
                module.weight.normal_(std=std)


class Optimizer:
    """Both optimizers behind one step; its state is tensors, numbers and names only."""

    def __init__(
        self, matrices: Sequence[Tensor], rest: Sequence[Tensor], rates: Rates | None = None
    ) -> None:
        self.rates = rates or Rates()
        self.parameters: list[Tensor] = [*matrices, *rest]
        self.muon = torch.optim.Muon(
            matrices, lr=self.rates.muon, weight_decay=self.rates.decay,
            adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self.adam = torch.optim.AdamW(rest, lr=self.rates.adam, betas=(0.9, 0.95), weight_decay=0.0)

    @classmethod
    def of(cls, network: Network, rates: Rates | None = None) -> Optimizer:
        """Return an optimizer of all parameters of a network that require gradients."""
        linear = [m for m in network.layers.modules() if isinstance(m, nn.Linear)]
        trainable = [p for p in network.parameters() if p.requires_grad]
        matrix_ids = {id(p) for m in linear for p in m.parameters() if p.dim() == 2}
        matrices = [p for p in trainable if id(p) in matrix_ids]
        return cls(matrices, [p for p in trainable if id(p) not in matrix_ids], rates)

    def step(self, factor: float) -> float:
        """Update at `factor` times the full learning rates; return the gradient's norm."""
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        pairs: list[tuple[torch.optim.Optimizer, float]]
        pairs = [(self.muon, self.rates.muon), (self.adam, self.rates.adam)]
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
    """Return the learning-rate factor: up over `warmup` steps, flat, then linearly to 0 over the
    last `decay`.

    `progress` is the elapsed share of the run, by steps or by the clock.
    """
    up = min(1.0, (step + 1) / warmup)
    return up * min(1.0, max(0.0, (1.0 - progress) / decay))
