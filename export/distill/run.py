"""A distillation from beginning to end: stages, saving, continuing, measuring.

A run's folder, beside the hybrid's, holds what it continues from and its learning curve. What it
learns next is a function of its options and of how much it has learned; no random state is kept
because none is used after the mixers are made. A run that ends by tokens is therefore the same to
the bit whether or not it was interrupted; one that ends by the clock is not the same twice.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from edge.errors import ExportError
from edge.export.calibration.texts import checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.distill import hybrid, stages
from edge.export.distill import optimizer as resuming
from edge.export.distill.curve import write_curve
from edge.export.distill.interrupted import stop_requests
from edge.export.distill.judge import FIGURES, Judge
from edge.export.distill.loss import Shares
from edge.export.distill.optimizer import Optimizer, Rates, trapezoid
from edge.export.distill.options import DistillOptions, check_same
from edge.export.distill.rows import read_rows
from edge.export.distill.save import teacher_layout, write_hybrid
from edge.export.distill.student import Student
from edge.export.network import Network

MATCH = Rates(muon=6e-3, adam=4e-3, decay=0.0)
LEARN = Rates(muon=1e-3, adam=5e-4, decay=0.0)
WARMUP = 20  # steps of every stage
FIRST_ROWS = 16  # of the text, on which mixers are made
POINTS = 200  # of the learning curve, about
Report = Callable[[str], None]
Values = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """From one share of the run to another; `blocks` is None while all mixers match."""

    name: str
    start: float
    end: float
    phase: int | None = None


@dataclass(frozen=True)
class DistillSummary:
    """What was made.

    Attributes:
        path: the hybrid, as `edge export` reads it. run: the run's folder.
        replaced: the blocks without attention, of `blocks`.
        figures: against the teacher, on text held out; see `Distance.summary`.
        costs: KL in nats a token of replacing a block alone; empty unless measured.
        phases: what each phase reached.
    """

    path: Path
    run: Path
    replaced: tuple[int, ...]
    blocks: int
    tokens: int
    seconds: float
    figures: dict[str, float]
    costs: dict[int, float]
    phases: list[Values]

    def to_dict(self) -> Values:
        return {
            "path": str(self.path), "run": str(self.run), "blocks": self.blocks,
            "replaced": list(self.replaced), "tokens": self.tokens,
            "seconds": round(self.seconds, 1), **self.figures,
            "costs": {str(block): cost for block, cost in self.costs.items()},
            "phases": self.phases,
        }  # fmt: skip


def distill(
    teacher: Path,
    out: Path,
    options: DistillOptions,
    report: Report = print,
    drawn: Callable[[list[Values]], str | None] = lambda curve: None,
) -> DistillSummary:
    """Make a hybrid of the teacher at `out`, or go on with a run that was interrupted.

    `drawn`: makes the picture of a learning curve, SVG, or None. SIGTERM and Ctrl-C end the run
    between two steps, with all it has learned kept. Raises CheckpointError, ExportError and
    InputError for what cannot be read, done or continued; SystemExit when it was told to stop.
    """
    return Distillation(teacher, out, options, report, drawn).run()


class Distillation:
    """One run; `distill` says what its arguments are."""

    def __init__(
        self,
        teacher: Path,
        out: Path,
        options: DistillOptions,
        report: Report,
        drawn: Callable[[list[Values]], str | None],
    ) -> None:
        self.options, self.out, self.report, self.drawn = options, out, report, drawn
        self.folder = out.with_name(f"{out.name}.run")
        self.checkpoint = open_checkpoint(teacher)
        config = self.checkpoint.config
        teacher_layout(self.checkpoint)
        hybrid.check_teacher(config, self.checkpoint.path)
        options.check(config)
        self._check_output()
        self.blocks = len(config.layers) // 2
        self._plan()
        reader = checkpoint_reader(self.checkpoint, config, options.tokenizer)
        report("reading text")
        # of few tokens there are still rows to choose from, and some to hold out
        few = 2 * options.batch * options.length
        wanted = None if options.tokens is None else max(options.tokens, few)
        self.rows = read_rows(options.text, reader, options.length, wanted, options.valid)
        if len(self.rows.learned) < options.batch:
            raise ExportError(
                f"{len(self.rows.learned)} rows to learn are fewer than a batch of {options.batch}",
                field="text", remedy="give more text, or a smaller --batch or --length",
            )  # fmt: skip
        self.total = options.tokens or self.rows.tokens
        self.teacher = Network(config)
        self.teacher.load_canonical(dict(self.checkpoint.tensors()))
        self.teacher.requires_grad_(False).to(options.device)
        torch.manual_seed(options.seed)
        self.student = Student(self.teacher, self.candidates, apart=options.train_all)
        self.student.to(options.device)
        held = self._ids(self.rows.held_out)
        self.judge = Judge(self.teacher, held, options.uses_bf16)
        self.place: Values = {
            "step": 0, "stage": 0, "stage_step": 0, "tokens": 0, "seconds": 0.0,
            "entered": 0, "order": self.order, "costs": {}, "phases": [], "curve": [],
        }  # fmt: skip
        self.clock = time.monotonic()

    # -- what is to be done -----------------------------------------------------------------------

    def _check_output(self) -> None:
        there = self.out.exists() and any(self.out.iterdir() if self.out.is_dir() else [self.out])
        if there and not (self.folder / "run.json").is_file():
            raise ExportError(
                "exists and is not the hybrid of a run that could continue", file=self.out,
                remedy="choose another folder, or remove it yourself",
            )  # fmt: skip

    def _plan(self) -> None:
        """Which blocks may be replaced, which are if nothing is measured, and the stages."""
        every, options = list(range(self.blocks)), self.options
        counts = [self.blocks - hybrid.kept_count(share, self.blocks) for share in options.keep]
        if options.chosen:
            self.order = hybrid.parse_blocks(options.layers, self.blocks)
            counts = [len(self.order)]
        else:
            self.order = hybrid.evenly(every, self.blocks - counts[-1])
        self.counts = counts
        measured = options.layers == "measured" and counts[-1] > 0
        self.candidates = every if measured else self.order
        self.stages: list[Stage] = []
        if not self.candidates:
            return
        if options.match > 0:
            self.stages.append(Stage("match", 0.0, options.match))
        each = (1 - options.match) / len(counts)
        for phase in range(len(counts)):
            start = options.match + phase * each
            if each > 0 or phase == len(counts) - 1:
                self.stages.append(Stage("learn", start, start + each, phase))

    def _phase_blocks(self, phase: int | None) -> list[int]:
        even = self.options.layers == "even"
        found = hybrid.phases(self.place["order"], self.counts, even)
        return found[-1 if phase is None else phase]

    def _ids(self, rows: Any) -> Tensor:
        return torch.from_numpy(rows.astype("int64")).to(self.options.device)

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> DistillSummary:
        """Every stage that is not done yet."""
        try:
            self._begin()
            self.clock = time.monotonic() - self.place["seconds"]
            with stop_requests() as stop:
                while self.place["stage"] < len(self.stages):
                    self._run_stage(stop)
                    self.place |= {"stage": self.place["stage"] + 1, "stage_step": 0}
                    self._end_stage()
            if not self.stages:
                self.student.replace([])
                self._write()
        except (OSError, SafetensorError) as problem:
            raise ExportError(
                f"was not written: {getattr(problem, 'strerror', None) or problem}",
                file=getattr(problem, "filename", None) or self.folder,
                remedy="what was saved before is whole: the same command continues",
            ) from problem
        return DistillSummary(
            self.out, self.folder, self.student.replaced, self.blocks, self.place["tokens"],
            self.place["seconds"], self.figures,
            {int(block): cost for block, cost in self.place["costs"].items()},
            self.place["phases"],
        )  # fmt: skip

    def _begin(self) -> None:
        """Make the mixers, or find what a run before left."""
        key = {
            "teacher": self.checkpoint.fingerprint(), "options": self.options.fixed(),
            "text": self.rows.record,
        }  # fmt: skip
        file = self.folder / "run.json"
        if file.is_file():
            check_same(json.loads(file.read_text()), key, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(key, indent=1) + "\n")
        if (found := resuming.progress(self.folder / "resume")) is not None:
            self.place = found
            self._enter(found["entered"])
            resuming.load(self.folder / "resume", self.student.kept(), self.optimizer)
            self.report(f"continuing after {found['tokens']} tokens")
            return
        if self.candidates and not self.options.fresh:
            self.report("making mixers of attention")
            first = self._ids(self.rows.learned[:FIRST_ROWS])
            with self._autocast():
                self.student.initialise(self.teacher, first, self.options.batch)
        self.student.replace(self.order)
        self._measure()
        if self.options.layers == "measured" and self.stages and self.stages[0].name != "match":
            self._choose()

    def _autocast(self) -> torch.autocast:
        kind = torch.device(self.options.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.uses_bf16)

    def _enter(self, index: int) -> None:
        """Set the student up for a stage, with an optimizer of its own."""
        stage, self.place["entered"] = self.stages[index], index
        blocks = self._phase_blocks(stage.phase)
        self.student.replace(blocks)
        if stage.name == "match":
            parts, rates = list(self.student.mixers.values()), MATCH
        else:
            parts, rates = [self.student.mixers[str(block)] for block in blocks], LEARN
            if self.options.train_all:
                parts = [self.student.network]
        matrices, rest = self.student.learns(parts)
        factor = self.options.rate
        rates = Rates(rates.muon * factor, rates.adam * factor, rates.decay)
        self.optimizer = Optimizer(matrices, rest, rates)

    def _progress(self) -> float:
        shares = [self.place["tokens"] / self.total]
        if self.options.minutes is not None:
            shares.append(self.place["seconds"] / 60 / self.options.minutes)
        return max(shares)

    def _run_stage(self, stop: list[int]) -> None:
        place, options = self.place, self.options
        stage = self.stages[place["stage"]]
        if place["stage_step"] == 0:
            self._enter(place["stage"])
        saved = time.monotonic()
        losses: list[float] = []
        while (done := self._progress()) < stage.end:
            ids = self._ids(self.rows.batch(place["step"], options.batch, options.seed))
            losses.append(self._step(stage, ids))
            inside = (done - stage.start) / (stage.end - stage.start)
            factor = trapezoid(place["stage_step"], max(inside, 0.0), warmup=WARMUP)
            norm = self.optimizer.step(factor)
            place["step"] += 1
            place["stage_step"] += 1
            place["tokens"] += ids.numel()
            place["seconds"] = time.monotonic() - self.clock
            if not math.isfinite(losses[-1]):
                raise ExportError(
                    f"the loss is no number after {place['tokens']} tokens", file=self.folder,
                    remedy="try again with a smaller --rate",
                )  # fmt: skip
            if self._point_due(losses):
                self._note(stage, losses, norm, factor)
                losses = []
            if stop:
                self._keep()
                raise SystemExit(128 + stop[0])
            if time.monotonic() - saved > options.save_every:
                self._measure()
                self._keep()
                self._write()
                saved = time.monotonic()

    def _step(self, stage: Stage, ids: Tensor) -> float:
        bf16 = self.options.uses_bf16
        if stage.name == "match":
            found = stages.match(self.teacher, self.student, ids, bf16)
            return sum(found.values()) / len(found)
        label = self.options.label
        shares = Shares(divergence=1 - label, overlap=0.0, choice=0.0, label=label)
        return stages.learn(self.teacher, self.student, ids, shares, bf16, self.options.recompute)

    def _end_stage(self) -> None:
        """What a stage leaves: the choice of blocks after matching, figures, files."""
        stage = self.stages[self.place["stage"] - 1]
        if stage.name == "match":
            if self.options.layers == "measured":
                self._choose()
            self.student.replace(self._phase_blocks(None))
        self._measure()
        if stage.phase is not None:
            figures = self.figures
            kept = self.blocks - len(self.student.replaced)
            phase = {"kept": kept, "replaced": list(self.student.replaced), **figures}
            self.place["phases"].append(phase)
            if stage.phase < len(self.counts) - 1:
                write_hybrid(
                    self.student, self.checkpoint, self.folder / f"kept-{kept}", self._card(figures)
                )
        self._keep()
        self._write()

    def _choose(self) -> None:
        self.report("measuring what each block costs")
        costs = self.judge.costs(self.student, self.candidates)
        cheapest = sorted(self.candidates, key=lambda block: costs[block])
        self.place["order"] = cheapest[: self.counts[-1]]
        self.place["costs"] = {str(block): costs[block] for block in sorted(costs)}

    # -- what is written --------------------------------------------------------------------------

    def _point_due(self, losses: list[float]) -> bool:
        curve = self.place["curve"]
        return bool(losses) and self.place["tokens"] - curve[-1]["tokens"] >= self.total / POINTS

    def _note(self, stage: Stage, losses: list[float], norm: float, factor: float) -> None:
        place = self.place
        point = {
            "step": place["step"], "stage": place["stage"], "name": stage.name,
            "tokens": place["tokens"], "seconds": round(place["seconds"], 1),
            "loss": sum(losses) / len(losses), "gradient": norm, "rate": factor,
        }  # fmt: skip
        place["curve"].append(point)
        speed = place["tokens"] / max(place["seconds"], 1e-9)
        self.report(
            f"{stage.name} {place['tokens']} of {self.total} tokens, loss {point['loss']:.4f}, "
            f"{speed:.0f} tokens/s"
        )

    @property
    def figures(self) -> dict[str, float]:
        """The newest distance from the teacher."""
        point = next(p for p in reversed(self.place["curve"]) if p["name"] == "valid")
        return {name: point[name] for name in FIGURES}

    def _measure(self) -> None:
        """How far the hybrid as it is now is from the teacher, as a point of the curve."""
        place, figures = self.place, self.judge.distance(self.student.network).summary()
        place["curve"].append(
            {
                "step": place["step"], "stage": place["stage"], "name": "valid",
                "tokens": place["tokens"], "seconds": round(place["seconds"], 1), **figures,
            }
        )  # fmt: skip
        told = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.report(f"after {place['tokens']} tokens: {told}")

    def _keep(self) -> None:
        """Write what the run continues from."""
        resuming.save(self.folder / "resume", self.student.kept(), self.optimizer, self.place)

    def _write(self) -> None:
        write_curve(self.folder / "curve.csv", self.place["curve"])
        if (picture := self.drawn(self.place["curve"])) is not None:
            (self.folder / "curve.svg").write_text(picture, encoding="utf-8")
        write_hybrid(self.student, self.checkpoint, self.out, self._card(self.figures))

    def _card(self, figures: dict[str, float]) -> Values:
        text = self.rows.record["text"]
        assert isinstance(text, list)
        return {
            **figures,
            "tokens learned from": self.place["tokens"],
            "seconds": round(self.place["seconds"]),
            "text": ", ".join(part["file"] for part in text),
            "options": json.dumps(self.options.fixed()),
        }
