"""Options of training runs, and which of them determine the result."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edge.config import AttentionConfig
from edge.errors import ExportError, Faults, InputError
from edge.export.checkpoint import Checkpoint
from edge.export.distill import drafter
from edge.export.distill.hybrid import CHOICES, MIXERS, check_teacher, parse_blocks
from edge.export.distill.loss import Shares

FREE = {"model", "minutes", "device", "bf16", "recompute", "threads", "save_every", "text", "valid"}


@dataclass(frozen=True)
class LearningOptions:
    """Options common to all training runs.

    Attributes:
        text: files to learn from; a continued run checks their content, not their names.
        tokens: total number of tokens to learn from; None is one pass over the text.
        minutes: time limit, if reached before `tokens`; interrupted earlier runs count.
        length, batch: tokens per row, rows per step.
        label: share of the loss on the text itself, next to the teacher's distribution.
        rate: factor on the learning rates.
        valid: file to measure on; None holds out a few rows of the text.
        tokenizer: file or folder that replaces the teacher's tokenizer.
        device: device as PyTorch names it.
        bf16: whether to multiply in bf16; None does where the device supports it.
        recompute: run layers again in the backward pass, to save memory at the cost of time.
        threads: number of CPU threads; None leaves it to PyTorch.
        save_every: seconds between checkpoints of the run.
    """

    text: tuple[Path, ...]
    tokens: int | None = None
    minutes: float | None = None
    length: int = 512
    batch: int = 8
    label: float = 0.0
    rate: float = 1.0
    valid: Path | None = None
    tokenizer: Path | None = None
    device: str = "cpu"
    bf16: bool | None = None
    recompute: bool = False
    threads: int | None = None
    seed: int = 0
    save_every: float = 900.0

    def check(self, teacher: Checkpoint) -> None:
        """Raise InputError listing every option that is invalid, alone or with this teacher."""
        faults = Faults()
        self._add_faults(faults, teacher)
        faults.refuse(InputError)

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        longest = teacher.config.max_context or 1 << 20
        if not self.text:
            faults.add("text", "names no file")
        ranges = {
            "label": (self.label, 0.0, 1.0),
            "rate": (self.rate, 1e-6, 1e3), "length": (self.length, 8, longest),
            "batch": (self.batch, 1, 1 << 16), "save_every": (self.save_every, 1.0, math.inf),
            "tokens": (1 if self.tokens is None else self.tokens, 1, math.inf),
            "minutes": (1 if self.minutes is None else self.minutes, 1e-6, math.inf),
        }  # fmt: skip
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:
                faults.add(name, f"{value:g} is outside {low:g} to {high:g}")
        if (problem := device_problem(self.device)) is not None:
            faults.add("device", problem)

    @property
    def uses_bf16(self) -> bool:
        if self.bf16 is not None:
            return self.bf16
        return multiplies_in_bf16(self.device)

    def fixed(self) -> dict[str, Any]:
        """Return the options that must not change when a run continues."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return plain


@dataclass(frozen=True)
class DistillOptions(LearningOptions):
    """Options of a distillation.

    Attributes:
        keep: shares of blocks that keep attention, descending, one per phase of the second stage.
        layers: `even`, `measured`, or the numbers of blocks to replace, such as 0,2,5-9.
        mixer: name of the mixer that replaces attention.
        match: share of the run in which mixers learn their attention's outputs.
        fresh: initialise mixers as for training from scratch, for comparison.
        train_all: the second stage trains everything, not only the new mixers.
    """

    keep: tuple[float, ...] = (0.5,)
    layers: str = "even"
    mixer: str = "mamba2"
    match: float = 0.5
    fresh: bool = False
    train_all: bool = False

    def check(self, teacher: Checkpoint) -> None:
        """Check as above; also raises ExportError for a teacher that is not built like Llama."""
        check_teacher(teacher.config, teacher.path)
        super().check(teacher)
        if self.chosen:
            parse_blocks(self.layers, len(teacher.config.layers) // 2)

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if not self.keep or not all(0 <= share <= 1 for share in self.keep):
            shares = ",".join(f"{share:g}" for share in self.keep)
            faults.add("keep_attention", f"{shares[:40]!r} is not a list of shares from 0 to 1")
        elif sorted(self.keep, reverse=True) != list(self.keep):
            faults.add("keep_attention", "does not descend", "such as 0.75,0.5")
        if self.mixer not in MIXERS:
            faults.add("mixer", f"{self.mixer[:40]!r} is not known", f"choose {', '.join(MIXERS)}")
        attention = teacher.config.layers_of(AttentionConfig).values()
        if self.mixer == "mamba1" and any(layer.qkv_bias for layer in attention):
            faults.add("mixer", "mamba1 has no biases for those of q and k", "choose mamba2")
        if not 0 <= self.match <= 1:
            faults.add("match", f"{self.match:g} is outside 0 to 1")

    @property
    def chosen(self) -> bool:
        """Whether `layers` lists blocks."""
        return self.layers not in CHOICES


@dataclass(frozen=True)
class TuneOptions(LearningOptions):
    """Options of fine-tuning.

    Attributes:
        model: checkpoint that learns.
    """

    model: Path = Path()
    label: float = 1.0


@dataclass(frozen=True)
class PreferenceOptions(TuneOptions):
    """Options of tuning on preferences.

    Attributes:
        beta: penalty for drifting from the teacher.
    """

    beta: float = 0.1

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if not 1e-6 <= self.beta <= 1e3:
            faults.add("beta", f"{self.beta:g} is outside 1e-06 to 1000")


@dataclass(frozen=True)
class DrafterOptions(LearningOptions):
    """Options of a drafter's training.

    Attributes:
        mixer: mamba, mamba2 or attention.
        layers: number of layers, of which MLPs behind attention are half.
        rank: rank of the factor of the target's head, and so the drafter's width.
        head: number of ids that it can draft, the most frequent of the text; None is all.
        choice, overlap: shares of the loss, see `Shares`.
        train_ends: whether embedding and head learn too.
    """

    mixer: str = "mamba2"
    layers: int = 4
    rank: int = 128
    head: int | None = None
    choice: float = 0.2
    overlap: float = 0.0
    train_ends: bool = False

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if self.mixer not in drafter.MIXERS:
            names = ", ".join(drafter.MIXERS)
            faults.add("mixer", f"{self.mixer[:40]!r} is not known", f"choose {names}")
        for name, value in (("choice", self.choice), ("overlap", self.overlap)):
            if not 0 <= value <= 1:
                faults.add(name, f"{value:g} is outside 0 to 1")
        if self.label + self.choice + self.overlap > 1:
            faults.add("label", "exceeds 1 together with choice and overlap")
        if self.rank not in range(32, (d_model := teacher.config.d_model) + 1, 32):
            faults.add("rank", f"{self.rank} is not a multiple of 32 up to {d_model}")
        if self.head is not None and not 1 <= self.head <= teacher.config.vocab_size:
            faults.add("head", f"{self.head} is outside 1 to {teacher.config.vocab_size}")
        elif self.head is not None and self.label:
            faults.add("label", "needs every id", "leave --head or --label out")
        if not 1 <= self.layers <= 64:
            faults.add("layers", f"{self.layers} is outside 1 to 64")
        elif self.mixer == drafter.ATTENTION and self.layers % 2:
            faults.add("layers", f"{self.layers} is odd: attention alternates with MLPs")

    @property
    def shares(self) -> Shares:
        rest = 1 - self.label - self.choice - self.overlap
        return Shares(rest, self.overlap, self.choice, self.label)


def multiplies_in_bf16(device: str) -> bool:
    """Return whether bf16 is fast on a device."""
    if device.startswith("cuda"):
        return True
    return device == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def device_problem(name: str) -> str | None:
    """Return why PyTorch cannot compute on a device, or None if it can."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as problem:
        return f"{name[:40]!r} cannot be used: {str(problem).splitlines()[0]:.200}"
    return None


def begun_with(file: Path) -> dict[str, Any]:
    """Return the options that a run was started with. Raises ExportError if the file is damaged."""
    try:
        record = json.loads(file.read_bytes())
        if isinstance(record, dict) and isinstance(record.get("options"), dict):
            return record
    except (ValueError, RecursionError):
        pass
    raise ExportError(
        "is damaged: the options of the run are lost", file=file,
        remedy=f"remove {file.parent} to start over, or choose another -o",
    )  # fmt: skip


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise ExportError listing every difference between the run that was started and this one."""
    faults = Faults()
    remedy = "repeat the options it was started with, remove the folder, or choose another -o"
    for name in ("teacher", "model"):
        if before.get(name) != now.get(name):
            faults.add(name, "is not the one the run was started with")
    if before.get("text") != json.loads(json.dumps(now["text"])):
        faults.add("text", "is not what the run was started with")
    old_options, new_options = before["options"], now["options"]
    for name in dict.fromkeys((*old_options, *new_options)):  # kinds of run differ in their options
        if (old := old_options.get(name)) != (value := new_options.get(name)):
            faults.add(name, f"was {old} when the run was started, and is now {value}")
    faults.refuse(ExportError, file=folder, remedy=remedy)
