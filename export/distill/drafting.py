"""The training of a drafter on its target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge.export.checkpoint import open_checkpoint
from edge.export.distill.drafter import begin, drafter_shape, write_drafter
from edge.export.distill.long_run import Drawn, LongRun, Report, Stage, Values
from edge.export.distill.optimizer import Optimizer, Rates
from edge.export.distill.options import DrafterOptions
from edge.export.distill.save import teacher_layout
from edge.export.distill.stages import learn, taught_hidden
from edge.export.network import Network
from edge.tensors import parameters

RATES = Rates(muon=6e-3, adam=2e-3, decay=0.1)
FIRST_ROWS = 16  # of the text, on which the sizes of the teacher's last hidden are found


@dataclass(frozen=True)
class DrafterSummary:
    """What was made: `figures` are against the teacher on text held out, see `Distance.summary`."""

    path: Path
    run: Path
    parameters: int
    tokens: int
    seconds: float
    figures: dict[str, float]

    def to_dict(self) -> Values:
        return {
            "path": str(self.path), "run": str(self.run), "parameters": self.parameters,
            "tokens": self.tokens, "seconds": round(self.seconds, 1), **self.figures,
        }  # fmt: skip


def train_drafter(
    teacher: Path,
    out: Path,
    options: DrafterOptions,
    report: Report = print,
    drawn: Drawn = lambda curve: None,
) -> DrafterSummary:
    """Make a drafter for the teacher at `out`, or go on with a run that was interrupted.

    As `edge.export.distill.run.distill`, in what it raises and how it ends.
    """
    return DrafterTraining(teacher, out, options, report, drawn).run()


class DrafterTraining(LongRun):
    """One run; `train_drafter` says what its arguments are."""

    def __init__(
        self, teacher: Path, out: Path, options: DrafterOptions, report: Report, drawn: Drawn
    ) -> None:
        self.options = options
        checkpoint = open_checkpoint(teacher)
        teacher_layout(checkpoint)
        options.check(checkpoint.config)
        super().__init__(checkpoint, out, options, report, drawn)
        config = drafter_shape(checkpoint.config, options.mixer, options.rank, options.layers)
        self.network = Network(config).to(options.device)
        self.stages = [Stage("learn", 0.0, 1.0)]

    def run(self) -> DrafterSummary:
        """Everything that is not done yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        width = self.teacher.config.d_model
        shape = (*self.rows.learned.shape, width)
        again = self.total > self.rows.tokens
        self.taught = TaughtRows(self.folder / "taught", shape) if again else None
        self.finish()
        return DrafterSummary(
            self.out, self.folder, parameters(self.network.config), self.place["tokens"],
            self.place["seconds"], self.figures,
        )  # fmt: skip

    def kept(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters())

    def start(self) -> None:
        first = self._ids(self.rows.learned[:FIRST_ROWS])
        hidden = taught_hidden(self.teacher, first, self.options.uses_bf16)
        begin(self.network, self.teacher, hidden.flatten(0, 1))
        self.measure()

    def enter(self, stage: Stage) -> Optimizer:
        self.network.embedding.requires_grad_(self.options.train_ends)
        matrices = [m.weight for m in self.network.layers.modules() if isinstance(m, nn.Linear)]
        known = {id(p) for p in matrices}
        rest = [p for p in self.network.parameters() if p.requires_grad and id(p) not in known]
        factor = self.options.rate
        return Optimizer(
            matrices, rest, Rates(RATES.muon * factor, RATES.adam * factor, RATES.decay)
        )

    def learn(self, stage: Stage, ids: Tensor) -> float:
        bf16 = self.options.uses_bf16
        taught = self._taught(ids)
        shares, again = self.options.shares, self.options.recompute
        return learn(self.teacher, self.network, ids, taught, shares, bf16, again)

    def _taught(self, ids: Tensor) -> Tensor:
        """What the teacher was about to say; rounded to fp16 where it will be wanted again."""
        bf16 = self.options.uses_bf16
        if self.taught is None:
            return taught_hidden(self.teacher, ids, bf16)
        asked = self.options
        places = self.rows.places(self.place["step"], asked.batch, asked.seed)
        if not self.taught.has(places):
            found = taught_hidden(self.teacher, ids, bf16).to(torch.float16)
            self.taught.put(places, found.cpu().numpy())
        return torch.from_numpy(self.taught.get(places)).to(ids.device)

    def leave(self, stage: Stage) -> None:
        self.measure()

    def write(self, folder: Path, card: Values) -> None:
        write_drafter(self.network, self.checkpoint, folder, card)


class TaughtRows:
    """The teacher's last hidden of every row, in files: text that is gone through more than once
    costs the teacher once.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        """`shape`: rows, tokens of a row, width. What an earlier run found is there."""
        folder.mkdir(exist_ok=True)
        rows, length, width = shape
        self._hidden = _mapped(folder / "hidden.f16", np.float16, (rows, length - 1, width))
        self._known = _mapped(folder / "known.bool", np.bool_, (rows,))

    def has(self, places: NDArray[np.int64]) -> bool:
        return bool(self._known[places].all())

    def get(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._hidden[places].astype(np.float32)
        return found

    def put(self, places: NDArray[np.int64], hidden: NDArray[np.float16]) -> None:
        self._hidden[places] = hidden
        self._known[places] = True


def _mapped(file: Path, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.memmap(file, dtype, "r+" if file.exists() else "w+", shape=shape)
