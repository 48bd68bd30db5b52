"""Measure how far a student is from its teacher, on text that neither learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.export.distill.student import Student
from edge.export.network import Network

SLICE = 256  # rows of logits held at once
FEW = 4  # rows on which each block is replaced alone


@dataclass
class Distance:
    """Sums over predicted tokens: losses in nats, KL(teacher ‖ student), equal likeliest ids, and
    the overlap Σ min(p, q), which is the share of drafts that rejection sampling accepts.
    """

    teacher_nats: float = 0.0
    nats: float = 0.0
    divergence: float = 0.0
    same: int = 0
    overlap: float = 0.0
    tokens: int = 0

    def summary(self) -> dict[str, float]:
        """Return perplexities, their ratio, KL in nats a token, the share of equal likeliest ids,
        and the mean overlap.
        """
        return {
            "perplexity": math.exp(self.nats / self.tokens),
            "teacher_perplexity": math.exp(self.teacher_nats / self.tokens),
            "perplexity_ratio": math.exp((self.nats - self.teacher_nats) / self.tokens),
            "kl": self.divergence / self.tokens,
            "same_choice": self.same / self.tokens,
            "overlap": self.overlap / self.tokens,
        }


FIGURES = tuple(Distance(tokens=1).summary())


class Judge:
    """Measures networks against a teacher, whose last hidden states are computed once."""

    def __init__(self, teacher: Network, rows: Tensor, bf16: bool) -> None:
        """Measure on rows [n, T] of ids."""
        self.teacher, self.rows, self.bf16 = teacher, rows, bf16
        self._taught: list[Tensor] = []

    def distance(self, network: Network) -> Distance:
        """Return a network's distance over all rows, each from an empty state."""
        if not self._taught:
            self._taught = [self._hidden(self.teacher, ids).cpu() for ids in self.rows]
        total = Distance()
        for ids, taught in zip(self.rows, self._taught, strict=True):
            self._add(total, network, ids, taught.to(ids.device))
        return total

    @torch.no_grad()
    def _hidden(self, network: Network, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.bf16):
            return network.hidden(ids[None, :-1])[0][0]

    @torch.no_grad()
    def _add(self, total: Distance, network: Network, ids: Tensor, taught: Tensor) -> None:
        hidden, targets = self._hidden(network, ids), ids[1:]
        for start in range(0, len(targets), SLICE):
            part = slice(start, start + SLICE)
            log_p = F.log_softmax(self.teacher.head(taught[part].float()), dim=-1)
            log_q = F.log_softmax(network.head(hidden[part].float()), dim=-1)
            target_ids = targets[part, None]
            total.teacher_nats -= float(log_p.gather(1, target_ids).sum())
            total.nats -= float(log_q.gather(1, target_ids).sum())
            total.divergence += float(F.kl_div(log_q, log_p, reduction="sum", log_target=True))
            total.overlap += float(torch.minimum(log_p, log_q).exp().sum())
            total.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        total.tokens += len(targets)

    def costs(self, student: Student, blocks: Sequence[int]) -> dict[int, float]:
        """Return the cost of replacing each block's attention alone: KL in nats a token, on the
        first FEW rows.
        """
        replaced, costs = student.replaced, {}
        judge = Judge(self.teacher, self.rows[:FEW], self.bf16)
        for block in blocks:
            student.replace([block])
            costs[block] = judge.distance(student.network).summary()["kl"]
        student.replace(replaced)
        return costs
