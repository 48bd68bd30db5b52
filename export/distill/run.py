"""The distillation of a hybrid: which mixers are made, what they learn in which stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from edge.export.checkpoint import open_checkpoint
from edge.export.distill import hybrid, stages
from edge.export.distill.long_run import Drawn, LongRun, Report, Stage, Values
from edge.export.distill.loss import Shares
from edge.export.distill.optimizer import Optimizer, Rates
from edge.export.distill.options import DistillOptions
from edge.export.distill.save import teacher_layout, write_hybrid
from edge.export.distill.student import Student
from edge.export.network import Network

MATCH = Rates(muon=6e-3, adam=4e-3, decay=0.0)
LEARN = Rates(muon=1e-3, adam=5e-4, decay=0.0)
FIRST_ROWS = 16  # of the text, on which mixers are made


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
    drawn: Drawn = lambda curve: None,
) -> DistillSummary:
    """Make a hybrid of the teacher at `out`, or go on with a run that was interrupted.

    `drawn`: makes the picture of a learning curve, SVG, or None. SIGTERM and Ctrl-C end the run
    between two steps, with all it has learned kept. Raises CheckpointError, ExportError and
    InputError for what cannot be read, done or continued; SystemExit when it was told to stop.
    """
    return Distillation(teacher, out, options, report, drawn).run()


class Distillation(LongRun):
    """One run; `distill` says what its arguments are."""

    def __init__(
        self, teacher: Path, out: Path, options: DistillOptions, report: Report, drawn: Drawn
    ) -> None:
        self.options = options
        checkpoint = open_checkpoint(teacher)
        teacher_layout(checkpoint)
        hybrid.check_teacher(checkpoint.config, checkpoint.path)
        options.check(checkpoint.config)
        self.blocks = len(checkpoint.config.layers) // 2
        self._plan()
        super().__init__(checkpoint, out, options, report, drawn)
        self.place |= {"order": self.order, "costs": {}, "phases": []}
        self.student = Student(self.teacher, self.candidates, apart=options.train_all)
        self.student.to(options.device)

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The hybrid as it is now."""
        return self.student.network

    # -- what is to be done -----------------------------------------------------------------------

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

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> DistillSummary:
        """Every stage that is not done yet."""
        self.finish()
        return DistillSummary(
            self.out, self.folder, self.student.replaced, self.blocks, self.place["tokens"],
            self.place["seconds"], self.figures,
            {int(block): cost for block, cost in self.place["costs"].items()},
            self.place["phases"],
        )  # fmt: skip

    def kept(self) -> dict[str, Tensor]:
        return self.student.kept()

    def start(self) -> None:
        if self.candidates and not self.options.fresh:
            self.report("making mixers of attention")
            first = self._ids(self.rows.learned[:FIRST_ROWS])
            with self.autocast():
                self.student.initialise(self.teacher, first, self.options.batch)
        self.student.replace(self.order)
        self.measure()
        if self.options.layers == "measured" and self.stages and self.stages[0].name != "match":
            self._choose()

    def enter(self, stage: Stage) -> Optimizer:
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
        return Optimizer(matrices, rest, rates)

    def learn(self, stage: Stage, ids: Tensor) -> float:
        bf16 = self.options.uses_bf16
        if stage.name == "match":
            found = stages.match(self.teacher, self.student, ids, bf16)
            return sum(found.values()) / len(found)
        label = self.options.label
        shares = Shares(divergence=1 - label, overlap=0.0, choice=0.0, label=label)
        taught = stages.taught_hidden(self.teacher, ids, bf16)
        again = self.options.recompute
        return stages.learn(self.teacher, self.network, ids, taught, shares, bf16, again)

    def leave(self, stage: Stage) -> None:
        """The choice of blocks after matching, figures, the hybrid of an earlier phase."""
        if stage.name == "match":
            if self.options.layers == "measured":
                self._choose()
            self.student.replace(self._phase_blocks(None))
        self.measure()
        if stage.phase is not None:
            figures = self.figures
            kept = self.blocks - len(self.student.replaced)
            phase = {"kept": kept, "replaced": list(self.student.replaced), **figures}
            self.place["phases"].append(phase)
            if stage.phase < len(self.counts) - 1:
                self.write(self.folder / f"kept-{kept}", self.card(figures))

    def _choose(self) -> None:
        self.report("measuring what each block costs")
        costs = self.judge.costs(self.student, self.candidates)
        cheapest = sorted(self.candidates, key=lambda block: costs[block])
        self.place["order"] = cheapest[: self.counts[-1]]
        self.place["costs"] = {str(block): costs[block] for block in sorted(costs)}

    def write(self, folder: Path, card: Values) -> None:
        if not self.stages:
            self.student.replace([])
        write_hybrid(self.student, self.checkpoint, folder, card)
