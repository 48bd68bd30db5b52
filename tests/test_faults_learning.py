"""Long training runs: killed, on a full disk, or with damage in what they resume from."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge.errors import ExportError
from edge.export.distill import resuming
from edge.export.distill.drafting import TaughtRows
from edge.export.distill.folders import alone, replace_folder
from edge.export.distill.optimizer import Optimizer
from edge.export.distill.options import DistillOptions
from edge.export.distill.run import Distillation, DistillSummary
from tests.facts import facts
from tests.tiny_teachers import write_words
from tests.transformers_checkpoints import save_llama


def quiet(line: str) -> None:
    pass


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of a file, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- checkpoints -----------------------------------------------------------------------------------


class Learner:
    """A matrix and a vector that learn, and the folder that keeps them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        layer = nn.Linear(64, 64)
        self.weights = dict(layer.named_parameters())
        self.optimizer = Optimizer([layer.weight], [layer.bias])

    def keep(self, step: int) -> None:
        for tensor in self.weights.values():
            tensor.grad = torch.full_like(tensor, float(step))
        self.optimizer.step(1.0)
        resuming.save(self.folder, self.weights, self.optimizer, {"step": step})

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def newest(self, said: list[str] | None = None) -> int | None:
        found = resuming.newest(self.folder, [].append if said is None else said.append)
        if found is None:
            return None
        found.load(self.weights, self.optimizer)
        return int(found.progress["step"])


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    made = Learner(tmp_path / "run" / "resume")
    assert made.newest() is None
    made.keep(1)
    made.keep(2)
    return made


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FILES = (resuming.WEIGHTS, resuming.OPTIMIZER, resuming.PROGRESS, resuming.SUMS)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_of_a_damaged_checkpoint_the_one_before_is_taken(
    name: str, damage: Callable[[Path], Any], learner: Learner
) -> None:
    damage(learner.folder / "step-00000002" / name)
    said: list[str] = []
    assert learner.newest(said) == 1 and "step-00000002" in said[0]
    damage(learner.folder / "step-00000001" / name)
    with pytest.raises(ExportError, match=r"step-00000002.*no other checkpoint is intact"):
        learner.newest()


@pytest.mark.parametrize("written", [b"[" * 100_000, b"[1]", b'"step"', b"{"])
def test_a_checkpoint_whose_progress_is_no_progress_is_skipped(
    written: bytes, learner: Learner
) -> None:
    newest = learner.folder / "step-00000002"
    (newest / resuming.PROGRESS).write_bytes(written)
    sums = json.loads((newest / resuming.SUMS).read_bytes())
    sums[resuming.PROGRESS] = hashlib.sha256(written).hexdigest()
    (newest / resuming.SUMS).write_text(json.dumps(sums))
    assert learner.newest() == 1
    (newest / resuming.SUMS).write_bytes(written)
    assert learner.newest() == 1


def test_a_save_leaves_two_and_nothing_of_what_was_killed(learner: Learner) -> None:
    (learner.folder / ".step-00000009.tmp").mkdir()  # a run was killed there
    learner.keep(5)
    assert learner.names() == ["step-00000002", "step-00000005"]
    cut(learner.folder / "step-00000005" / resuming.WEIGHTS)
    assert learner.newest() == 2
    learner.keep(3)
    assert learner.names() == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("room", [64, 17_500])
def test_a_full_disk_is_an_oserror_and_takes_nothing(room: int, learner: Learner) -> None:
    with largest_file(room), pytest.raises(Exception, match="File too large"):
        learner.keep(3)
    assert learner.names() == ["step-00000001", "step-00000002"] and learner.newest() == 2


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistillOptions]:
    folder = tmp_path_factory.mktemp("learning")
    teacher = save_llama(folder / "tiny", num_hidden_layers=1)
    text = write_words(folder / "words.txt")
    options = DistillOptions((text,), keep=(0.0,), tokens=64, length=8, batch=2, match=0.0)
    return teacher, options


def distill(asked: tuple[Path, DistillOptions], out: Path) -> DistillSummary:
    return Distillation(asked[0], out, asked[1], quiet).run()


def test_a_product_that_was_not_written_is_written_by_the_next_run(
    asked: tuple[Path, DistillOptions], tmp_path: Path
) -> None:
    """A run ended between its last checkpoint and its product: killed, or on a full disk."""
    out = tmp_path / "hybrid"
    with largest_file(45_000), pytest.raises(ExportError, match="the same command continues"):
        distill(asked, out)
    kept = list((tmp_path / "hybrid.run" / "resume").iterdir())
    assert kept and not out.exists() and not list(tmp_path.glob(".*"))
    made = distill(asked, out)
    first = (out / "model.safetensors").read_bytes()
    assert made.tokens == 64 and first
    mine = out / "mine.txt"
    mine.write_text("put there afterwards: a run that is over writes nothing")
    distill(asked, out)
    assert mine.exists()
    replace_folder(out, tmp_path / "elsewhere")
    distill(asked, out)
    assert (out / "model.safetensors").read_bytes() == first


def test_a_run_whose_books_are_damaged_is_not_continued(
    asked: tuple[Path, DistillOptions], tmp_path: Path
) -> None:
    out = tmp_path / "hybrid"
    distill(asked, out)
    book = tmp_path / "hybrid.run" / "run.json"
    for content in (b"", b'{"options": ', b"[]", b"\xff"):
        book.write_bytes(content)
        with pytest.raises(ExportError, match=r"run\.json: is damaged"):
            distill(asked, out)
    book.unlink()
    out.rename(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match=r"run\.json: is missing"):
        distill(asked, out)


def test_one_process_at_a_time_continues_a_run(
    asked: tuple[Path, DistillOptions], tmp_path: Path
) -> None:
    with alone(tmp_path / "hybrid.run"), pytest.raises(ExportError, match="another process"):
        distill(asked, tmp_path / "hybrid")
    for name in ("/", ".", ".."):
        with pytest.raises(ExportError, match=facts("not name", "new folder")):
            distill(asked, Path(name))


# -- teacher outputs -------------------------------------------------------------------------------


def test_what_a_teacher_said_is_known_once_it_is_kept(tmp_path: Path) -> None:
    shape, rows = (4, 3, 2), np.array([1, 2])
    taught = TaughtRows(tmp_path / "taught", shape)
    taught.put(rows, np.ones((2, 3, 2), np.float16))
    assert taught.has(rows)
    assert not TaughtRows(tmp_path / "taught", shape).has(rows), "a crash may have lost it"
    taught.put(rows, np.ones((2, 3, 2), np.float16))
    taught.keep()
    again = TaughtRows(tmp_path / "taught", shape)
    assert again.has(rows) and again.get(rows).all() and not again.has(np.array([0]))
    cut(tmp_path / "taught" / "hidden.f16")
    assert not TaughtRows(tmp_path / "taught", shape).has(rows)
    with largest_file(32), pytest.raises(OSError, match="File too large"):
        TaughtRows(tmp_path / "other", shape)
