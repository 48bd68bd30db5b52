"""A long run of learning from a teacher: stages, saving, continuing, measuring.

A run's folder, beside the product's, holds what it continues from and its learning curve. What it
learns next is a function of its options and of how much it has learned; no random state is kept
because none is used after the first weights are made. A run that ends by tokens is therefore the
same to the bit whether or not it was interrupted; one that ends by the clock is not the same twice.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from edge.errors import ExportError
from edge.export.calibration.texts import TextReader, checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.distill import resuming
from edge.export.distill.curve import write_curve
from edge.export.distill.folders import alone, replace_file
from edge.export.distill.interrupted import stop_requests
from edge.export.distill.judge import FIGURES, Judge
from edge.export.distill.optimizer import Optimizer, trapezoid
from edge.export.distill.options import LearningOptions, begun_with, check_same
from edge.export.distill.rows import TokenRows, read_rows
from edge.export.distill.save import source_layout
from edge.export.network import Network

WARMUP = 20  # steps of every stage
POINTS = 200  # of the learning curve, about
Report = Callable[[str], None]
Values = dict[str, Any]
Drawn = Callable[[list[Values]], str | None]
Options = TypeVar("Options", bound=LearningOptions)


@dataclass(frozen=True)
class Stage:
    """From one share of the run to another; `phase` is None while all mixers match."""

    name: str
    start: float
    end: float
    phase: int | None = None


@dataclass(frozen=True)
class Summary:
    """What was made.

    Attributes:
        path: the product, as `edge export` reads it. run: the run's folder.
        figures: against the teacher, on text held out; see `Distance.summary`.
    """

    path: Path
    run: Path
    tokens: int
    seconds: float
    figures: dict[str, float]

    def to_dict(self) -> Values:
        return {
            "path": str(self.path), "run": str(self.run), "tokens": self.tokens,
            "seconds": round(self.seconds, 1), **self.figures,
        }  # fmt: skip


class LongRun(ABC, Generic[Options]):
    """A run from its options to its product at `out`.

    Attributes:
        checkpoint, teacher: the teacher, which learns nothing.
        network: who learns, as it is now.
        rows: the text. figure_names: what `judged` finds on what is held out of it.
        stages: what is to be done; none where there is nothing to learn.
        place: how far the run is, as JSON holds it.
    """

    network: Network
    figure_names: tuple[str, ...] = FIGURES
    stages: list[Stage]
    optimizer: Optimizer

    def __init__(
        self, teacher: Path, out: Path, options: Options,
        report: Report = print, drawn: Drawn = lambda curve: None,
    ) -> None:  # fmt: skip
        """`drawn`: makes the picture of a learning curve, SVG, or None. Raises CheckpointError,
        InputError, and ExportError: too little text, something else at `out`.
        """
        self.options, self.out, self.report, self.drawn = options, out, report, drawn
        if out.name in ("", ".."):
            raise ExportError(
                "is no name of a folder to make", file=out, remedy="choose another -o"
            )
        self.folder = out.with_name(f"{out.name}.run")
        self.checkpoint = checkpoint = open_checkpoint(teacher)
        source_layout(checkpoint)
        options.check(checkpoint)
        self._check_output()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        reader = checkpoint_reader(checkpoint, checkpoint.config, options.tokenizer)
        report("reading text")
        # of few tokens there are still rows to choose from, and some to hold out
        few = 2 * options.batch * options.length
        wanted = None if options.tokens is None else max(options.tokens, few)
        self.rows = self.read(reader, wanted)
        if len(self.rows.learned) < options.batch:
            raise ExportError(
                f"{len(self.rows.learned)} rows to learn are fewer than a batch of {options.batch}",
                field="text", remedy="give more text, or a smaller --batch or --length",
            )  # fmt: skip
        self.total = options.tokens or self.rows.tokens
        self.teacher = Network(checkpoint.config)
        self.teacher.load_canonical(dict(checkpoint.tensors()))
        self.teacher.requires_grad_(False).to(options.device)
        torch.manual_seed(options.seed)
        self.place: Values = {
            "step": 0, "stage": 0, "stage_step": 0, "tokens": 0, "seconds": 0.0,
            "entered": 0, "curve": [],
        }  # fmt: skip
        self.clock = time.monotonic()
        self.prepare()

    # -- what a kind of run says ------------------------------------------------------------------

    def read(self, reader: TextReader, wanted: int | None) -> TokenRows:
        """About this many tokens of the text."""
        asked = self.options
        return read_rows(asked.text, reader, asked.length, wanted, asked.valid)

    def judged(self) -> dict[str, float]:
        """How the network as it is now does on what is held out: how far from the teacher it is."""
        return self.judge.distance(self.network).summary()

    @cached_property
    def judge(self) -> Judge:
        held = self._ids(self.rows.held_out)
        return Judge(self.teacher, held, self.options.uses_bf16)

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the checkpoints that a resumed run must find unchanged."""
        return {"teacher": self.checkpoint.fingerprint()}

    @abstractmethod
    def prepare(self) -> None:
        """Make the network, whatever its weights, and the stages."""

    @abstractmethod
    def kept(self) -> Mapping[str, Tensor]:
        """The parameters that the run may change: what it continues from."""

    @abstractmethod
    def start(self) -> None:
        """Make the first weights."""

    @abstractmethod
    def enter(self, stage: Stage) -> Optimizer:
        """Set up for a stage, with an optimizer of its own."""

    @abstractmethod
    def learn(self, stage: Stage, ids: Tensor) -> float:
        """Leave the gradients of a batch [B, T] in what learns; returns the loss."""

    @abstractmethod
    def leave(self, stage: Stage) -> None:
        """Measure what a stage leaves, and do what follows from it."""

    @abstractmethod
    def write(self, folder: Path, card: Values) -> None:
        """Put the product there, in place of one that was there."""

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Make the product, or resume a run that was interrupted.

        SIGTERM and Ctrl-C end it between two steps, with all it has learned kept. Raises
        ExportError for what cannot be written or continued; SystemExit after a request to stop.
        """
        try:
            with alone(self.folder):
                self._begin()
                self.clock = time.monotonic() - self.place["seconds"]
                self._run()
        except (OSError, SafetensorError) as problem:
            raise ExportError(
                f"was not written: {getattr(problem, 'strerror', None) or problem}",
                file=getattr(problem, "filename", None) or self.folder,
                remedy="what was saved before is whole: the same command continues",
            ) from problem
        place = self.place
        return Summary(self.out, self.folder, place["tokens"], place["seconds"], self.figures)

    def _run(self) -> None:
        with stop_requests() as stop:
            while self.place["stage"] < len(self.stages):
                self._run_stage(stop)
                self.place |= {"stage": self.place["stage"] + 1, "stage_step": 0}
                self.leave(self.stages[self.place["stage"] - 1])
                self._keep()
                self._write()
        # a run before may have ended between what it kept and the product
        if not self._written():
            self._write()

    def _begin(self) -> None:
        """Make the first weights, or find what a run before left."""
        key = {
            **self.fingerprints(), "options": self.options.fixed(), "text": self.rows.record,
        }  # fmt: skip
        file = self.folder / "run.json"
        if file.is_file():
            check_same(begun_with(file), key, self.folder)
        kept = resuming.newest(self.folder / "resume", self.report)
        if not file.is_file():
            if kept is not None:
                raise ExportError(
                    "is missing, and there is what a run continues from", file=file,
                    remedy=f"remove {self.folder}, or choose another -o",
                )  # fmt: skip
            replace_file(file, json.dumps(key, indent=1).encode() + b"\n")
        self.continue_from(kept) if kept is not None else self.start()

    def continue_from(self, kept: resuming.Kept) -> None:
        """Take up a run where it was kept."""
        self.place = kept.progress
        self._enter(kept.progress["entered"])
        kept.load(self.kept(), self.optimizer)
        self.report(f"continuing after {kept.progress['tokens']} tokens")

    def _enter(self, index: int) -> None:
        self.place["entered"] = index
        self.optimizer = self.enter(self.stages[index])

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
            losses.append(self.learn(stage, ids))
            inside = (done - stage.start) / (stage.end - stage.start)
            factor = trapezoid(place["stage_step"], max(inside, 0.0), warmup=WARMUP)
            norm = self.optimizer.step(factor)
            place["step"] += 1
            place["stage_step"] += 1
            place["tokens"] += ids.numel()
            place["seconds"] = time.monotonic() - self.clock
            if not math.isfinite(losses[-1]):
                raise ExportError(
                    f"the loss is not a number after {place['tokens']} tokens", file=self.folder,
                    remedy="try again with a smaller --rate",
                )  # fmt: skip
            if self._point_due(losses):
                self._note(stage, losses, norm, factor)
                losses = []
            if stop:
                self._keep()
                raise SystemExit(128 + stop[0])
            if time.monotonic() - saved > options.save_every:
                self.measure()
                self._keep()
                self._write()
                saved = time.monotonic()

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
        return {name: point[name] for name in self.figure_names}

    def measure(self) -> None:
        """What `judged` finds now, as a point of the curve."""
        place, figures = self.place, self.judged()
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
        resuming.save(self.folder / "resume", self.kept(), self.optimizer, self.place)

    def _write(self) -> None:
        write_curve(self.folder / "curve.csv", self.place["curve"], self.figure_names)
        if (picture := self.drawn(self.place["curve"])) is not None:
            (self.folder / "curve.svg").write_text(picture, encoding="utf-8")
        self.write(self.out, self.card(self.figures))
        replace_file(self.folder / "written.json", json.dumps(self._product()).encode())

    def _written(self) -> bool:
        """Whether the product is there, as the run is now."""
        with suppress(OSError, ValueError):
            found = json.loads((self.folder / "written.json").read_bytes())
            return found == self._product() and self.out.exists()
        return False

    def _product(self) -> Values:
        return {name: self.place[name] for name in ("step", "stage")}

    def card(self, figures: dict[str, float]) -> Values:
        """What the model card says of the run."""
        text = self.rows.record["text"]
        assert isinstance(text, list)
        return {
            **figures,
            "tokens learned from": self.place["tokens"],
            "seconds": round(self.place["seconds"]),
            "text": ", ".join(part["file"] for part in text),
            "options": json.dumps(self.options.fixed()),
        }

    # -- small things -----------------------------------------------------------------------------

    def autocast(self) -> torch.autocast:
        kind = torch.device(self.options.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.uses_bf16)

    def _ids(self, rows: Any) -> Tensor:
        return torch.from_numpy(rows.astype("int64")).to(self.options.device)

    def _check_output(self) -> None:
        there = self.out.exists() and any(self.out.iterdir() if self.out.is_dir() else [self.out])
        if there and not (self.folder / "run.json").is_file():
            raise ExportError(
                "exists and is not of a run that could continue", file=self.out,
                remedy="choose another folder, or remove it yourself",
            )  # fmt: skip
