"""Fine-tune on answers and on preferences after distillation (The Mamba in the Llama, section 3,
equations 2 and 4).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from edge.errors import ExportError
from edge.export.calibration.texts import TextReader
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.layout import Layout, TensorPlace
from edge.export.distill.conversations import read_conversations
from edge.export.distill.long_run import LongRun, Stage, Values
from edge.export.distill.loss import Shares, head_loss, taught_loss
from edge.export.distill.optimizer import Optimizer, Rates
from edge.export.distill.options import PreferenceOptions, TuneOptions
from edge.export.distill.rows import TokenRows
from edge.export.distill.save import source_layout, write_checkpoint
from edge.export.distill.shared import share
from edge.export.distill.stages import hidden_of
from edge.export.network import Network

ENDS = ("embedding.weight", "lm_head.weight")
Tuned = TypeVar("Tuned", bound=TuneOptions)


class Tuning(LongRun[Tuned]):
    """A run in which a model learns from conversations, next to its teacher or its former self.

    Embedding and head do not change.
    """

    rates: ClassVar[Rates]
    form: ClassVar[str]

    def read(self, reader: TextReader, wanted: int | None) -> TokenRows:
        options = self.options
        return read_conversations(
            options.text, reader, options.length, wanted, options.valid, self.form
        )

    def fingerprints(self) -> dict[str, str]:
        return super().fingerprints() | {"model": self.source.fingerprint()}

    def prepare(self) -> None:
        self.source = open_checkpoint(self.options.model)
        self.layout = source_layout(self.source)
        if self.source.config.vocab_size != self.teacher.config.vocab_size:
            raise ExportError("has a different vocabulary from its teacher", file=self.source.path)
        if any(place.adapter or place.behind for place in self.layout.pieces.values()):
            raise ExportError("shares layers with adapters: cannot tune", file=self.source.path)
        self.network = Network(self.source.config)
        self.network.load_canonical(dict(self.source.tensors()))
        self.network.to(self.options.device)
        share_stored(self.network, self.layout)
        self.stages = [Stage("learn", 0.0, 1.0)]

    def kept(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters())

    def start(self) -> None:
        self.measure()

    def enter(self, stage: Stage) -> Optimizer:
        fixed = {
            id(tensor)
            for name, tensor in self.network.canonical_tensors().items()
            if name in ENDS or name not in self.layout.pieces  # the latter are not stored
        }
        for parameter in self.network.parameters():
            parameter.requires_grad_(id(parameter) not in fixed)
        return Optimizer.of(self.network, self.rates.times(self.options.rate))

    def leave(self, stage: Stage) -> None:
        self.measure()

    def write(self, folder: Path, card: Values) -> None:
        tensors = {name: p.detach().cpu() for name, p in self.network.canonical_tensors().items()}
        write_checkpoint(
            folder, self.source, self.layout, tensors, self.title, card, self.options.tokenizer
        )

    @property
    @abstractmethod
    def title(self) -> str:
        """The model card's first words, which say what was done."""

    def hidden(self, network: Network, ids: Tensor) -> Tensor:
        """Return the last hidden [B, T - 1, D] for predicting every id but the first."""
        with self.autocast():
            return hidden_of(network, ids[:, :-1], self.options.recompute)

    def answers(self, network: Network, rows: Tensor) -> Tensor:
        """Return log p, in nats, of the answers in each row [B, T] of `conversations` ids."""
        ids, in_answer = plain(rows), rows[:, 1:] >= 0
        hidden = self.hidden(network, ids)
        dtype = torch.bfloat16 if self.options.uses_bf16 else torch.float32
        cap = network.config.logits_softcap
        return torch.stack([
            -head_loss(h[mask], network.head_weight, i[mask], dtype, softcap=cap)
            for h, i, mask in zip(hidden, ids[:, 1:], in_answer, strict=True)
        ])  # fmt: skip

    def held(self) -> Iterable[Tensor]:
        """Yield the held-out rows, one at a time."""
        return (self._ids(row[None]) for row in self.rows.held_out)


class FineTuning(Tuning[TuneOptions]):
    """Learns the tokens of answers, and with a teacher its distribution over them."""

    rates = Rates(muon=1e-3, adam=5e-4, decay=0.0)
    form = "a conversation"
    figure_names = ("loss", "perplexity", "teacher_loss")
    title = "fine-tuned on answers by `edge train sft`"

    def learn(self, stage: Stage, ids: Tensor) -> float:
        in_answer, plain_ids = ids[:, 1:] >= 0, plain(ids)
        bf16, label = self.options.uses_bf16, self.options.label
        hidden = self.hidden(self.network, plain_ids)[in_answer]
        with torch.no_grad():
            taught = self.hidden(self.teacher, plain_ids)[in_answer] if label < 1 else None
        ours = self.network.head_weight
        targets, dtype = ids[:, 1:][in_answer], torch.bfloat16 if bf16 else torch.float32
        caps = self.network.config.logits_softcap, self.teacher.config.logits_softcap
        if taught is None:
            loss = head_loss(hidden, ours, targets, dtype, softcap=caps[0])
        else:
            shares = Shares(1 - label, 0.0, 0.0, label)
            theirs = self.teacher.head_weight
            loss = taught_loss(
                hidden, ours, taught, theirs, shares, dtype, targets=targets, softcaps=caps
            )
        loss = loss / len(targets)
        torch.autograd.backward(loss)
        return float(loss.detach())

    @torch.no_grad()
    def judged(self) -> dict[str, float]:
        """Return nats a token on the held-out answers, for the model and for its teacher."""
        nats, teacher_nats, count = 0.0, 0.0, 0
        for row in self.held():
            nats -= float(self.answers(self.network, row))
            teacher_nats -= float(self.answers(self.teacher, row))
            count += int((row[:, 1:] >= 0).sum())
        loss = nats / count
        return {"loss": loss, "perplexity": math.exp(loss), "teacher_loss": teacher_nats / count}


class PreferenceTuning(Tuning[PreferenceOptions]):
    """DPO (equation 4; arXiv 2305.18290, equation 7): favors chosen answers over rejected ones."""

    rates = Rates(muon=1e-4, adam=5e-5, decay=0.0)
    form = "a preference"
    figure_names = ("loss", "margin", "preferred")
    title = "tuned on preferences by `edge train dpo`"

    def margins(self, pairs: Tensor) -> Tensor:
        """Return β·(log p/p_teacher of the chosen - log p/p_teacher of the rejected), [B].

        pairs [B, 2, T], the chosen first.
        """
        rows = pairs.flatten(0, 1)
        with torch.no_grad():
            teacher_log_p = self.answers(self.teacher, rows)
        reward = self.options.beta * (self.answers(self.network, rows) - teacher_log_p)
        chosen, rejected = reward.unflatten(0, (-1, 2)).unbind(1)
        return chosen - rejected

    def learn(self, stage: Stage, ids: Tensor) -> float:
        loss = -F.logsigmoid(self.margins(ids)).mean()
        torch.autograd.backward(loss)
        return float(loss.detach())

    @torch.no_grad()
    def judged(self) -> dict[str, float]:
        """Return the loss and mean margin of held-out pairs, and the share of positive margins."""
        margins = torch.cat([self.margins(pair) for pair in self.held()])
        return {
            "loss": float(-F.logsigmoid(margins).mean()),
            "margin": float(margins.mean()),
            "preferred": float((margins > 0).float().mean()),
        }


def plain(rows: Tensor) -> Tensor:
    """Return the ids of rows that store ~id outside answers."""
    return torch.where(rows < 0, ~rows, rows)


def share_stored(network: Network, layout: Layout) -> None:
    """Make rows that the checkpoint stores once share one parameter."""
    for name, place in layout.pieces.items():
        stored = _stored_rows(place)
        if len(set(stored)) < len(stored):
            share(network, name, stored)


def _stored_rows(place: TensorPlace) -> tuple[int, ...]:
    """Return the index of the stored row for each row, counted over all pieces of the tensor."""
    parts = [(block.source.name, row) for block in place.blocks for row in block.rows]
    order = {part: at for at, part in enumerate(dict.fromkeys(parts))}
    return tuple(order[part] for part in parts) if parts else place.rows
