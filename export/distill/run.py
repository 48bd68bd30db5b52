"""Distill a hybrid: make its mixers and train them in stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from edge.export.distill import hybrid, stages
from edge.export.distill.long_run import LongRun, Stage, Summary, Values
from edge.export.distill.loss import Shares
from edge.export.distill.optimizer import Optimizer, Rates
from edge.export.distill.options import DistillOptions
from edge.export.distill.save import write_hybrid
from edge.export.distill.student import Student
from edge.export.network import Network

MATCH = Rates(muon=6e-3, adam=4e-3, decay=0.0)
LEARN = Rates(muon=1e-3, adam=5e-4, decay=0.0)
FIRST_ROWS = 16  # rows of text on which mixers are initialised


@dataclass(frozen=True)
class DistillSummary(Summary):
    """Result of a distillation.

    Attributes:
        replaced: blocks without attention.
        blocks: number of blocks.
        costs: block → KL in nats a token of replacing it alone; empty unless measured.
        phases: figures reached in each phase.
    """

    replaced: tuple[int, ...]
    blocks: int
    costs: dict[int, float]
    phases: list[Values]

    def to_dict(self) -> Values:
        return super().to_dict() | {
            "blocks": self.blocks, "replaced": list(self.replaced),
            "costs": {str(block): cost for block, cost in self.costs.items()},
            "phases": self.phases,
        }  # fmt: skip


class Distillation(LongRun[DistillOptions]):
    """A run that makes a hybrid from a teacher."""

    def prepare(self) -> None:
        self.blocks = len(self.checkpoint.config.layers) // 2
        self._plan()
        self.place |= {"order": self.order, "costs": {}, "phases": []}
        make = hybrid.mixer_maker(self.options.mixer, self.checkpoint.config)
        apart = self.options.train_all
        self.student = Student(self.teacher, self.candidates, apart=apart, make=make)
        self.student.to(self.options.device)

    @property
    def network(self) -> Network:  # type: ignore[override]
        """The hybrid in its current form."""
        return self.student.network

    # -- planning ---------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Choose the blocks that may be replaced, the default ones to replace, and the stages."""
        all_blocks, options = list(range(self.blocks)), self.options
        counts = [self.blocks - hybrid.kept_count(share, self.blocks) for share in options.keep]
        if options.chosen:
            self.order = hybrid.parse_blocks(options.layers, self.blocks)
            counts = [len(self.order)]
        else:
            self.order = hybrid.evenly(all_blocks, self.blocks - counts[-1])
        self.counts = counts
        measured = options.layers == "measured" and counts[-1] > 0
        self.candidates = all_blocks if measured else self.order
        self.stages: list[Stage] = []
        if not self.candidates:
            return
        if options.match > 0:
            self.stages.append(Stage("match", 0.0, options.match))
        phase_share = (1 - options.match) / len(counts)
        for phase in range(len(counts)):
            start = options.match + phase * phase_share
            if phase_share > 0 or phase == len(counts) - 1:
                self.stages.append(Stage("learn", start, start + phase_share, phase))

    def _phase_blocks(self, phase: int | None) -> list[int]:
        even = self.options.layers == "even"
        phases = hybrid.phases(self.place["order"], self.counts, even)
        return phases[-1 if phase is None else phase]

    # -- running ----------------------------------------------------------------------------------

    def run(self) -> DistillSummary:
        summary, costs = super().run(), self.place["costs"]
        return DistillSummary(
            **vars(summary), replaced=self.student.replaced, blocks=self.blocks,
            costs={int(block): cost for block, cost in costs.items()}, phases=self.place["phases"],
        )  # fmt: skip

    def kept(self) -> dict[str, Tensor]:
        return self.student.kept()

    def start(self) -> None:
        if self.candidates and not self.options.fresh:
            self.report("making mixers from attention")
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
        return Optimizer(matrices, rest, rates.times(self.options.rate))

    def learn(self, stage: Stage, ids: Tensor) -> float:
        bf16 = self.options.uses_bf16
        if stage.name == "match":
            losses = stages.match(self.teacher, self.student, ids, bf16)
            return sum(losses.values()) / len(losses)
        label = self.options.label
        shares = Shares(divergence=1 - label, overlap=0.0, choice=0.0, label=label)
        taught = stages.taught_hidden(self.teacher, ids, bf16)
        recompute = self.options.recompute
        return stages.learn(self.teacher, self.network, ids, taught, shares, bf16, recompute)

    def leave(self, stage: Stage) -> None:
        """Choose blocks after matching; measure; write the hybrid of an earlier phase."""
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
        write_hybrid(self.student, self.checkpoint, folder, card, self.options.tokenizer)
