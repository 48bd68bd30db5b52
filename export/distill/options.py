"""What is asked of a distillation, and what of it makes the result what it is."""

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
from edge.export.distill.drafter import STATES
from edge.export.distill.hybrid import CHOICES, MIXERS, check_teacher, parse_blocks
from edge.export.distill.loss import Shares

FREE = {"model", "minutes", "device", "bf16", "recompute", "threads", "save_every", "text", "valid"}


@dataclass(frozen=True)
class LearningOptions:
    """How a run goes.

    Attributes:
        text: files to learn from; they are checked by their content, not by their names.
        tokens: how many are learned from in all; None is once through the text.
        minutes: an end by the clock, whichever comes first; earlier runs of the same count.
        length, batch: tokens of a row, rows of a step.
        label: share of the loss that is the text itself, beside the teacher's distribution.
        rate: factor on the learning rates.
        valid: a file to measure on; None holds a few rows of the text out.
        tokenizer: a file or folder to use in place of the teacher's own.
        device: as PyTorch names it. bf16: None is wherever the device multiplies it.
        recompute: spend time on memory: layers run again in the backward pass.
        threads: of the CPU; None leaves it to PyTorch.
        save_every: seconds between what a run can continue from.
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
        """Raise InputError with everything that no teacher, or not this one, can be asked for."""
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
        if self.device.startswith("cuda"):
            return True
        return self.device == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())

    def fixed(self) -> dict[str, Any]:
        """What a run that continues must have been begun with."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE}
        read: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return read


@dataclass(frozen=True)
class DistillOptions(LearningOptions):
    """How a hybrid is made.

    Attributes:
        keep: shares of blocks that keep attention, descending: a phase of the second stage each.
        layers: `even`, `measured`, or block numbers that lose it, such as 0,2,5-9.
        mixer: what comes in its place.
        match: share of the run in which mixers learn their attention's outputs.
        fresh: make mixers as those of a model to be trained from nothing, to compare with.
        train_all: the second stage trains everything, not the new mixers alone.
    """

    keep: tuple[float, ...] = (0.5,)
    layers: str = "even"
    mixer: str = "mamba2"
    match: float = 0.5
    fresh: bool = False
    train_all: bool = False

    def check(self, teacher: Checkpoint) -> None:
        """Raises ExportError too, for a teacher that is not like a Llama."""
        check_teacher(teacher.config, teacher.path)
        super().check(teacher)
        if self.chosen:
            parse_blocks(self.layers, len(teacher.config.layers) // 2)

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if not self.keep or not all(0 <= share <= 1 for share in self.keep):
            shares = ",".join(f"{share:g}" for share in self.keep)
            faults.add("keep_attention", f"{shares[:40]!r} is not made of shares from 0 to 1")
        elif sorted(self.keep, reverse=True) != list(self.keep):
            faults.add("keep_attention", "does not descend", "such as 0.75,0.5")
        if self.mixer not in MIXERS:
            faults.add("mixer", f"{self.mixer[:40]!r} is not known", f"choose {', '.join(MIXERS)}")
        first = teacher.config.layers[0]
        if self.mixer == "mamba1" and isinstance(first, AttentionConfig) and first.qkv_bias:
            faults.add("mixer", "mamba1 has no biases to take those of q and k", "choose mamba2")
        if not 0 <= self.match <= 1:
            faults.add("match", f"{self.match:g} is outside 0 to 1")

    @property
    def chosen(self) -> bool:
        """Whether `layers` names blocks."""
        return self.layers not in CHOICES


@dataclass(frozen=True)
class TuneOptions(LearningOptions):
    """How a model is tuned.

    Attributes:
        model: the checkpoint that learns.
    """

    model: Path = Path()
    label: float = 1.0


@dataclass(frozen=True)
class PreferenceOptions(TuneOptions):
    """How a model is tuned on preferences.

    Attributes:
        beta: how dear it is to leave the teacher.
    """

    beta: float = 0.1

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if not 1e-6 <= self.beta <= 1e3:
            faults.add("beta", f"{self.beta:g} is outside 1e-06 to 1000")


@dataclass(frozen=True)
class DrafterOptions(LearningOptions):
    """How a drafter is made.

    Attributes:
        mixer: mamba or mamba2. layers: how many of it.
        rank: of the factor of the target's head that is the drafter's embedding and head: its
            width.
        choice, overlap: shares of the loss, see `Shares`.
        train_ends: the factor learns too.
    """

    mixer: str = "mamba2"
    layers: int = 4
    rank: int = 128
    choice: float = 0.2
    overlap: float = 0.0
    train_ends: bool = False

    def _add_faults(self, faults: Faults, teacher: Checkpoint) -> None:
        super()._add_faults(faults, teacher)
        if self.mixer not in STATES:
            faults.add("mixer", f"{self.mixer[:40]!r} is not known", f"choose {', '.join(STATES)}")
        for name, value in (("choice", self.choice), ("overlap", self.overlap)):
            if not 0 <= value <= 1:
                faults.add(name, f"{value:g} is outside 0 to 1")
        if self.label + self.choice + self.overlap > 1:
            faults.add("label", "with choice and overlap is more than 1")
        if self.rank not in range(32, (wide := teacher.config.d_model) + 1, 32):
            faults.add("rank", f"{self.rank} is not a multiple of 32 up to {wide}")
        if not 1 <= self.layers <= 64:
            faults.add("layers", f"{self.layers} is outside 1 to 64")

    @property
    def shares(self) -> Shares:
        rest = 1 - self.label - self.choice - self.overlap
        return Shares(rest, self.overlap, self.choice, self.label)


def device_problem(name: str) -> str | None:
    """Why PyTorch cannot compute there; None when it can."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as problem:
        return f"{name[:40]!r} cannot be used: {str(problem).splitlines()[0]:.200}"
    return None


def begun_with(file: Path) -> dict[str, Any]:
    """What a run was begun with. Raises ExportError: the file is damaged."""
    try:
        read = json.loads(file.read_bytes())
        if isinstance(read, dict) and isinstance(read.get("options"), dict):
            return read
    except (ValueError, RecursionError):
        pass
    raise ExportError(
        "is damaged: what the run was begun with is lost", file=file,
        remedy=f"remove {file.parent} to begin again, or choose another -o",
    )  # fmt: skip


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise ExportError with all that differs between the run that was begun and this one."""
    faults = Faults()
    remedy = "repeat the options it was begun with, or remove the folder, or choose another -o"
    for name in ("teacher", "model"):
        if before.get(name) != now.get(name):
            faults.add(name, "is not the one the run was begun with")
    if before.get("text") != json.loads(json.dumps(now["text"])):
        faults.add("text", "is not what the run was begun with")
    then, asked = before["options"], now["options"]
    for name in dict.fromkeys((*then, *asked)):  # another kind of run has others
        if (old := then.get(name)) != (value := asked.get(name)):
            faults.add(name, f"was {old} when the run was begun, and is {value}")
    faults.refuse(ExportError, file=folder, remedy=remedy)
