"""A slightly trained Transformer to learn from, and runs that are stopped."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edge.export.calibration.texts import checkpoint_reader
from edge.export.checkpoint import open_checkpoint
from edge.export.checkpoint.checkpoint import as_stored
from edge.export.distill.loss import head_loss
from edge.export.distill.optimizer import Optimizer, trapezoid
from edge.export.distill.rows import read_rows
from edge.export.distill.save import source_layout
from edge.export.network import Network
from tests.transformers_checkpoints import save_llama

WORDS = "the state of the model is the whole of the past and a robot walks then it stops"
_ROOT = tempfile.TemporaryDirectory(prefix="edge-teachers-")


def write_words(file: Path) -> Path:
    words = WORDS.split()
    picked = torch.randint(len(words), (6000,), generator=torch.Generator().manual_seed(0))
    file.write_text(" ".join(words[word] for word in picked))
    return file


@cache
def taught() -> tuple[Path, Path]:
    """Return a text and a teacher trained on it. Both are made once a process: only read them."""
    text = write_words(Path(_ROOT.name) / "words.txt")
    with torch.random.fork_rng(
        devices=[]
    ):  # neither its numbers nor a test's depend on who is first
        torch.default_generator.manual_seed(0)
        return text, _train_teacher(Path(_ROOT.name) / "tiny", text)


def _train_teacher(path: Path, text: Path) -> Path:
    """Train three blocks to spell, so that their attention carries information."""
    save_llama(path, num_hidden_layers=3)
    checkpoint = open_checkpoint(path)
    network = network_of(path).requires_grad_(True)
    rows = read_rows([text], checkpoint_reader(checkpoint, checkpoint.config), 33, None, None)
    optimizer = Optimizer.of(network)
    for number in range(60):
        ids = torch.from_numpy(rows.batch(number, 8, 0)).long()
        hidden = network.hidden(ids[:, :-1])[0].flatten(0, 1)
        assert network.lm_head is not None
        loss = head_loss(hidden, network.lm_head.weight, ids[:, 1:].flatten()) / hidden.shape[0]
        torch.autograd.backward(loss)
        optimizer.step(trapezoid(number, number / 60, warmup=10))
    tensors = {name: p.detach() for name, p in network.canonical_tensors().items()}
    stored = as_stored(source_layout(checkpoint), tensors)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path


def network_of(path: Path) -> Network:
    checkpoint = open_checkpoint(path)
    network = Network(checkpoint.config).eval()
    network.load_canonical(dict(checkpoint.tensors()))
    return network.requires_grad_(False)


def until(when: Callable[[str], bool], run: Callable[[Callable[[str], None]], object]) -> None:
    """Run until a line of the report matches, then send SIGTERM."""

    def report(line: str) -> None:
        if when(line):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        run(report)
    assert left.value.code == 128 + signal.SIGTERM
