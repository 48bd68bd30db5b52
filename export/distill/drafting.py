"""Train a drafter on its target's distribution."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge.export.distill.drafter import begin, drafter_shape, most_frequent, write_drafter
from edge.export.distill.long_run import LongRun, Stage, Summary, Values
from edge.export.distill.optimizer import Optimizer, Rates
from edge.export.distill.options import DrafterOptions
from edge.export.distill.stages import learn, taught_hidden
from edge.export.network import Network
from edge.replace import replace
from edge.tensors import parameters

RATES = Rates(muon=6e-3, adam=2e-3, decay=0.1)
FIRST_ROWS = 16  # rows of text on which the principal axes of the teacher's last hidden are found


@dataclass(frozen=True)
class DrafterSummary(Summary):
    """Result of a drafter's training."""

    parameters: int

    def to_dict(self) -> Values:
        return super().to_dict() | {"parameters": self.parameters}


class DrafterTraining(LongRun[DrafterOptions]):
    """A run that trains a drafter for a teacher."""

    def prepare(self) -> None:
        options = self.options
        vocab_size = self.teacher.config.vocab_size
        head_ids = most_frequent(self.rows.learned, options.head or vocab_size, vocab_size)
        config = drafter_shape(
            self.teacher.config, options.mixer, options.rank, options.layers, head_ids
        )
        self.network = Network(config).to(options.device)
        self.stages = [Stage("learn", 0.0, 1.0)]

    def run(self) -> DrafterSummary:
        return DrafterSummary(**vars(super().run()), parameters=parameters(self.network.config))

    def kept(self) -> dict[str, Tensor]:
        return dict(self.network.named_parameters())

    def start(self) -> None:
        first = self._ids(self.rows.learned[:FIRST_ROWS])
        hidden = taught_hidden(self.teacher, first, self.options.uses_bf16)
        begin(self.network, self.teacher, hidden.flatten(0, 1))
        self.measure()

    def enter(self, stage: Stage) -> Optimizer:
        rows, length = self.rows.learned.shape
        shape = (rows, length - 1, self.teacher.config.d_model)
        # not on a GPU, whose runs are so long that they would fill a disk
        cached = self.total > self.rows.tokens and not self.options.device.startswith("cuda")
        self.taught = TaughtRows(self.folder / "taught", shape) if cached else None
        self.network.embedding.requires_grad_(self.options.train_ends)
        return Optimizer.of(self.network, RATES.times(self.options.rate))

    def learn(self, stage: Stage, ids: Tensor) -> float:
        bf16 = self.options.uses_bf16
        taught = self._teacher_hidden(ids)
        shares, recompute = self.options.shares, self.options.recompute
        return learn(self.teacher, self.network, ids, taught, shares, bf16, recompute)

    def _teacher_hidden(self, ids: Tensor) -> Tensor:
        """Return the teacher's last hidden; it is rounded to fp16 if it will be needed again."""
        bf16 = self.options.uses_bf16
        if self.taught is None:
            return taught_hidden(self.teacher, ids, bf16)
        options = self.options
        places = self.rows.places(self.place["step"], options.batch, options.seed)
        if not self.taught.has(places):
            hidden = taught_hidden(self.teacher, ids, bf16).to(torch.float16)
            self.taught.put(places, hidden.cpu().numpy())
        return torch.from_numpy(self.taught.get(places)).to(ids.device)

    def leave(self, stage: Stage) -> None:
        self.measure()

    def _keep(self) -> None:
        if self.taught is not None:
            self.taught.keep()
        super()._keep()

    def write(self, folder: Path, card: Values) -> None:
        write_drafter(self.network, self.checkpoint, folder, card, self.options.tokenizer)


class TaughtRows:
    """The teacher's last hidden of every row, cached in files: the teacher runs once on text that
    is read several times.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int]) -> None:
        """Open or create the files for `shape`: rows, tokens per row less one, width.

        Raises OSError when the disk is too full. All the space is reserved now, because writing to
        a mapped file on a full disk would kill the process.
        """
        folder.mkdir(exist_ok=True)
        hidden, self._file = folder / "hidden.f16", folder / "known.bool"
        size = 2 * math.prod(shape)
        if _size(hidden) == size and _size(self._file) == shape[0]:
            self._known = np.fromfile(self._file, np.bool_)
        else:
            self._file.unlink(missing_ok=True)
            _reserve(hidden, size)
            self._known = np.zeros(shape[0], np.bool_)
        self._hidden = np.memmap(hidden, np.float16, "r+", shape=shape)

    def has(self, places: NDArray[np.int64]) -> bool:
        return bool(self._known[places].all())

    def get(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._hidden[places].astype(np.float32)
        return rows

    def put(self, places: NDArray[np.int64], hidden: NDArray[np.float16]) -> None:
        self._hidden[places] = hidden
        self._known[places] = True

    def keep(self) -> None:
        """Sync the rows to disk, then the record of which rows are present."""
        self._hidden.flush()
        replace(self._file, [self._known.tobytes()], mode=0o666)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _reserve(file: Path, size: int) -> None:
    try:
        with file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, size)
    except OSError as problem:
        file.unlink(missing_ok=True)
        raise OSError(problem.errno, problem.strerror, str(file)) from None
