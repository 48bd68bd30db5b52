"""A long run of learning from a teacher: stages, saving, continuing, measuring.

A run's folder, next to the product's, holds its checkpoints and its learning curve. The next batch
depends only on the options and on the progress. No random state is saved, because none is used
after the first weights are made. A run that ends by tokens therefore gives the same bits whether or
not it was interrupted; a run that ends by the clock is not reproducible.
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
from edge.export.distill.folders import alone
from edge.export.distill.interrupted import stop_requests
from edge.export.distill.judge import FIGURES, Judge
from edge.export.distill.optimizer import Optimizer, trapezoid
from edge.export.distill.options import LearningOptions, begun_with, check_same
from edge.export.distill.rows import TokenRows, read_rows
from edge.export.distill.save import source_layout
from edge.export.network import Network
from edge.replace import replace

WARMUP = 20  # steps at the start of every stage
POINTS = 200  # approximate number of points of the learning curve
Report = Callable[[str], None]
Values = dict[str, Any]
Drawn = Callable[[list[Values]], str | None]
Options = TypeVar("Options", bound=LearningOptions)


@dataclass(frozen=True)
class Stage:
    """A stage, from one share of the run to another; `phase` is None in the matching stage."""

    name: str
    start: float
    end: float
    phase: int | None = None


@dataclass(frozen=True)
class Summary:
    """Result of a run.

    Attributes:
        path: the product, in a form that `edge export` reads.
        run: the run's folder.
        figures: figures against the teacher on held-out text, see `Distance.summary`.
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
        checkpoint, teacher: the teacher, which does not learn.
        network: the model that learns, in its current form.
        rows: rows of the text.
        figure_names: names of the figures that `judged` returns.
        stages: stages of the run; empty if there is nothing to learn.
        place: progress of the run, as JSON values.
    """

    network: Network
    figure_names: tuple[str, ...] = FIGURES
    stages: list[Stage]
    optimizer: Optimizer

    def __init__(
        self, teacher: Path, out: Path, options: Options,
        report: Report = print, drawn: Drawn = lambda curve: None,
    ) -> None:  # fmt: skip
        """Open the teacher and read the text. `drawn` draws a learning curve as SVG, or returns
        None.

        Raises CheckpointError, InputError, or ExportError when there is too little text or `out`
        is something else.
        """
        self.options, self.out, self.report, self.drawn = options, out, report, drawn
        if out.name in ("", ".."):
            raise ExportError("does not name a new folder", file=out, remedy="choose another -o")
        self.folder = out.with_name(f"{out.name}.run")
        self.checkpoint = checkpoint = open_checkpoint(teacher)
        source_layout(checkpoint)
        options.check(checkpoint)
        self._check_output()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        reader = checkpoint_reader(checkpoint, checkpoint.config, options.tokenizer)
        report("reading text")
        # read enough rows to choose from and to hold out, however few the tokens
        minimum = 2 * options.batch * options.length
        token_goal = None if options.tokens is None else max(options.tokens, minimum)
        self.rows = self.read(reader, token_goal)
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

    # -- what subclasses define -------------------------------------------------------------------

    def read(self, reader: TextReader, wanted: int | None) -> TokenRows:
        """Read about `wanted` tokens of the text."""
        options = self.options
        return read_rows(options.text, reader, options.length, wanted, options.valid)

    def judged(self) -> dict[str, float]:
        """Return figures of the current network on held-out text: its distance from the teacher."""
        return self.judge.distance(self.network).summary()

    @cached_property
    def judge(self) -> Judge:
        held_out = self._ids(self.rows.held_out)
        return Judge(self.teacher, held_out, self.options.uses_bf16)

    def fingerprints(self) -> dict[str, str]:
        """Return fingerprints of the checkpoints that must not change before a run continues."""
        return {"teacher": self.checkpoint.fingerprint()}

    @abstractmethod
    def prepare(self) -> None:
        """Make the network, with any weights, and the stages."""

    @abstractmethod
    def kept(self) -> Mapping[str, Tensor]:
        """Return the parameters that the run may change, which a checkpoint must store."""

    @abstractmethod
    def start(self) -> None:
        """Make the first weights."""

    @abstractmethod
    def enter(self, stage: Stage) -> Optimizer:
        """Set up for a stage and return its optimizer."""

    @abstractmethod
    def learn(self, stage: Stage, ids: Tensor) -> float:
        """Compute gradients for a batch [B, T], leave them in the parameters, return the loss."""

    @abstractmethod
    def leave(self, stage: Stage) -> None:
        """Measure the result of a stage, and act on it."""

    @abstractmethod
    def write(self, folder: Path, card: Values) -> None:
        """Write the product to `folder`, replacing an older one."""

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Make the product, or resume a run that was interrupted.

        SIGTERM and Ctrl-C end it between two steps and save its progress. Raises ExportError when
        the run cannot be written or continued, and SystemExit after a request to stop.
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
                remedy="what was saved before is intact: the same command continues",
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
        # an earlier run may have ended between its last checkpoint and the product
        if not self._written():
            self._write()

    def _begin(self) -> None:
        """Make the first weights, or find the checkpoint of an earlier run."""
        key = {
            **self.fingerprints(), "options": self.options.fixed(), "text": self.rows.record,
        }  # fmt: skip
        file = self.folder / "run.json"
        if file.is_file():
            check_same(begun_with(file), key, self.folder)
        checkpoint = resuming.newest(self.folder / "resume", self.report)
        if not file.is_file():
            if checkpoint is not None:
                raise ExportError(
                    "is missing, but the run has checkpoints", file=file,
                    remedy=f"remove {self.folder}, or choose another -o",
                )  # fmt: skip
            replace(file, [json.dumps(key, indent=1).encode(), b"\n"], mode=0o666)
        self.continue_from(checkpoint) if checkpoint is not None else self.start()

    def continue_from(self, kept: resuming.WholeCheckpoint) -> None:
        """Continue a run from a checkpoint."""
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
            stage_progress = (done - stage.start) / (stage.end - stage.start)
            factor = trapezoid(place["stage_step"], max(stage_progress, 0.0), warmup=WARMUP)
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
                self._add_point(stage, losses, norm, factor)
                losses = []
            if stop:
                self._keep()
                raise SystemExit(128 + stop[0])
            if time.monotonic() - saved > options.save_every:
                self.measure()
                self._keep()
                self._write()
                saved = time.monotonic()

    # -- writing ----------------------------------------------------------------------------------

    def _point_due(self, losses: list[float]) -> bool:
        curve = self.place["curve"]
        return bool(losses) and self.place["tokens"] - curve[-1]["tokens"] >= self.total / POINTS

    def _add_point(self, stage: Stage, losses: list[float], norm: float, factor: float) -> None:
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
        """The latest figures against the teacher."""
        point = next(p for p in reversed(self.place["curve"]) if p["name"] == "valid")
        return {name: point[name] for name in self.figure_names}

    def measure(self) -> None:
        """Add the current figures of `judged` to the curve."""
        place, figures = self.place, self.judged()
        place["curve"].append(
            {
                "step": place["step"], "stage": place["stage"], "name": "valid",
                "tokens": place["tokens"], "seconds": round(place["seconds"], 1), **figures,
            }
        )  # fmt: skip
        line = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        self.report(f"after {place['tokens']} tokens: {line}")

    def _keep(self) -> None:
        """Write a checkpoint of the run."""
        resuming.save(self.folder / "resume", self.kept(), self.optimizer, self.place)

    def _write(self) -> None:
        write_curve(self.folder / "curve.csv", self.place["curve"], self.figure_names)
        if (picture := self.drawn(self.place["curve"])) is not None:
            (self.folder / "curve.svg").write_text(picture, encoding="utf-8")
        self.write(self.out, self.card(self.figures))
        progress = json.dumps(self._product_progress()).encode()
        replace(self.folder / "written.json", [progress], mode=0o666)

    def _written(self) -> bool:
        """Return whether the product exists and matches the run's progress."""
        with suppress(OSError, ValueError, RecursionError):
            record = json.loads((self.folder / "written.json").read_bytes())
            return record == self._product_progress() and self.out.exists()
        return False

    def _product_progress(self) -> Values:
        return {name: self.place[name] for name in ("step", "stage")}

    def card(self, figures: dict[str, float]) -> Values:
        """Return the model card's entries about the run."""
        text = self.rows.record["text"]
        assert isinstance(text, list)
        return {
            **figures,
            "tokens learned from": self.place["tokens"],
            "seconds": round(self.place["seconds"]),
            "text": ", ".join(part["file"] for part in text),
            "options": json.dumps(self.options.fixed()),
        }

    # -- helpers ----------------------------------------------------------------------------------

    def autocast(self) -> torch.autocast:
        kind = torch.device(self.options.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=self.options.uses_bf16)

    def _ids(self, rows: Any) -> Tensor:
        return torch.from_numpy(rows.astype("int64")).to(self.options.device)

    def _check_output(self) -> None:
        occupied = self.out.exists() and any(
            self.out.iterdir() if self.out.is_dir() else [self.out]
        )
        if occupied and not (self.folder / "run.json").is_file():
            raise ExportError(
                "exists and does not belong to a run that could continue", file=self.out,
                remedy="choose another -o, or remove the folder",
            )  # fmt: skip
