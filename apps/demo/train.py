"""Train a demonstration model: `python -m edge.apps.demo.train {tokenizer|chat|draft|bytes|…}`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from torch import Tensor

from edge.apps.demo.cards import CONVERSATIONS, Figures, chat_rows, converse, measure, text_rows
from edge.apps.demo.data import Batch, Codec, Rows, TrainingData, make_codec
from edge.apps.demo.distill import TalkRows, Taught, TeacherLessons, start_from
from edge.apps.demo.save import save_model
from edge.apps.demo.shapes import BYTES, config_for
from edge.apps.demo.tokenizer import train_tokenizer
from edge.config import ModelConfig
from edge.export.distill import resuming
from edge.export.distill.interrupted import stop_requests
from edge.export.distill.loss import SHARES, Shares, head_loss, taught_loss
from edge.export.distill.optimizer import Optimizer, initialise, trapezoid
from edge.export.network import Network
from edge.tensors import parameters


class What(StrEnum):
    TOKENIZER = "tokenizer"
    CHAT = "chat"
    DRAFT = "draft"
    BYTES = "bytes"
    MAMBA1 = "mamba1"
    MAMBA1_BYTES = "mamba1-bytes"


@dataclass(frozen=True)
class TrainingPlan:
    """Parameters of a run: `batch` rows of `width` ids per step, until `steps` or `minutes`."""

    width: int = 513
    batch: int = 8
    steps: int | None = None
    minutes: float | None = None
    seed: int = 0
    device: str = "cpu"
    bf16: bool = True
    talk_only: bool = False
    greet: float = 1.0
    save_every: float = 300.0
    valid_conversations: int | None = 150
    taught: Taught | None = None
    start: Path | None = None

    def progress(self, step: int, seconds: float) -> float:
        """Return the completed share of the run."""
        shares = [0.0]
        if self.steps:
            shares.append(step / self.steps)
        if self.minutes:
            shares.append(seconds / 60 / self.minutes)
        return max(shares)


class Epochs(Protocol):
    """Source of any number of epochs of rows."""

    def epoch(self, number: int) -> Rows | TalkRows: ...


def batches(data: Epochs, batch: int, epoch: int, row: int) -> Iterator[tuple[Batch, int, int]]:
    """Yield batches of `batch` rows from a place on, with the place after each."""
    while True:
        rows = data.epoch(epoch)
        while row + batch <= len(rows):
            row += batch
            yield rows.batch(slice(row - batch, row)), epoch, row
        epoch, row = epoch + 1, 0


def learn(network: Network, batch: Batch, bf16: bool, lessons: TeacherLessons | None) -> Tensor:
    """Return the mean loss over the masked-in ids."""
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=bf16):
        hidden, _ = network.hidden(batch.ids[:, :-1])
    predicted = batch.mask[:, 1:]
    weight = network.head_weight
    dtype = torch.bfloat16 if bf16 else torch.float32
    states, targets = hidden[predicted], batch.ids[:, 1:][predicted]
    if lessons is None:
        return head_loss(states, weight, targets, dtype) / predicted.sum()
    assert batch.taught is not None
    head = lessons.head.to(weight.device)
    loss = taught_loss(states, weight, batch.taught, head, lessons.shares, dtype)
    return loss / predicted.sum()


def train(
    config: ModelConfig, data: Path, out: Path, plan: TrainingPlan, tokenizer: Path | None
) -> dict[str, Any]:
    """Train to the end of the plan, continuing the run in `out`. Return the card's figures."""
    torch.manual_seed(plan.seed)
    network = Network(config)
    initialise(network)
    if plan.start is not None:
        start_from(network, plan.start)
    network.to(plan.device)
    optimizer, weights = Optimizer.of(network), dict(network.named_parameters())
    progress: dict[str, Any] = {"step": 0, "epoch": 0, "row": 0, "tokens": 0, "seconds": 0.0}
    if (snapshot := resuming.newest(out / "resume", print)) is not None:
        snapshot.load(weights, optimizer)
        progress |= snapshot.progress
    codec = make_codec(tokenizer)
    lessons = find_lessons(plan, codec)
    training: Epochs = lessons or TrainingData(
        data, codec, plan.width, plan.seed, plan.talk_only, plan.greet
    )
    rows, size = chat_rows(data / "chat.valid.jsonl", codec, plan.width, plan.valid_conversations)

    def validate() -> Figures:
        return measure(network, rows, size, torch.bfloat16 if plan.bf16 else torch.float32)

    def agreement() -> dict[str, Any]:
        return {} if lessons is None else {"teacher": lessons.agreement(network) | lessons.size()}

    def save(valid: Figures) -> None:
        resuming.save(out / "resume", weights, optimizer, progress)
        card = (
            describe(config, plan, progress) | {"chat_valid_sample": valid.summary()} | agreement()
        )
        save_model(network, out, tokenizer, card)

    if progress["step"] == 0:
        save(validate())
    stream = batches(training, plan.batch, progress["epoch"], progress["row"])
    clock = time.monotonic() - progress["seconds"]
    saved, losses = time.monotonic(), list[float]()
    with stop_requests() as stop:
        while (share := plan.progress(progress["step"], progress["seconds"])) < 1.0:
            batch, progress["epoch"], progress["row"] = next(stream)
            loss = learn(network, batch.to(plan.device), plan.bf16, lessons)
            torch.autograd.backward(loss)
            norm = optimizer.step(factor := trapezoid(progress["step"], share))
            progress["step"] += 1
            progress["tokens"] += batch.ids[:, 1:].numel()
            progress["seconds"] = time.monotonic() - clock
            losses.append(float(loss.detach()))
            if progress["step"] % 50 == 0:
                report(progress, sum(losses) / len(losses), norm, factor)
                losses.clear()
            if stop:
                resuming.save(out / "resume", weights, optimizer, progress)
                raise SystemExit(128 + stop[0])
            if time.monotonic() - saved > plan.save_every:
                valid = validate()
                print(f"valid {valid.summary() | agreement()}", flush=True)
                save(valid)
                saved = time.monotonic()
    # save before computing the figures, which takes a while
    resuming.save(out / "resume", weights, optimizer, progress)
    card = describe(config, plan, progress) | final_figures(network, data, tokenizer, plan)
    card |= agreement()
    save_model(network, out, tokenizer, card)
    return card


def find_lessons(plan: TrainingPlan, codec: Codec) -> TeacherLessons | None:
    if plan.taught is None:
        return None
    return TeacherLessons(plan.taught, codec, plan.width, plan.batch, plan.seed)


def final_figures(
    network: Network, data: Path, tokenizer: Path | None, plan: TrainingPlan
) -> dict[str, Any]:
    """Return fp32 figures on both validation files (4 kB of each document), and sample answers."""
    codec = make_codec(tokenizer)
    chat = measure(network, *chat_rows(data / "chat.valid.jsonl", codec, plan.width))
    text = measure(network, *text_rows(data / "pretrain.valid.txt", codec, plan.width, 4096))
    samples = {
        f"temperature {temperature}": [
            converse(network, codec, turns, temperature) for turns in CONVERSATIONS
        ]
        for temperature in (0.0, 0.7)
    }
    return {"chat_valid": chat.summary(), "pretrain_valid": text.summary(), "samples": samples}


def report(place: dict[str, Any], loss: float, norm: float, factor: float) -> None:
    rate = place["tokens"] / max(place["seconds"], 1e-9)
    print(
        f"step {place['step']} epoch {place['epoch']} loss {loss:.4f} grad {norm:.2f} "
        f"lr {factor:.3f} {place['seconds'] / 60:.1f} min {rate:.0f} tokens/s",
        flush=True,
    )


def describe(config: ModelConfig, plan: TrainingPlan, place: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of the card: the model, and its training so far."""
    cuda = plan.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {
        "family": config.family,
        "parameters": parameters(config),
        "steps": place["step"],
        "tokens_seen": place["tokens"],
        "epochs": place["epoch"],
        "wall_seconds": round(place["seconds"]),
        "machine": f"{machine}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "batch_rows": plan.batch,
        "row_ids": plan.width,
        "bf16_autocast": plan.bf16,
        "talk_only": plan.talk_only,
        "greet": plan.greet,
        "seed": plan.seed,
    }


def main(
    what: What,
    data: Annotated[Path, typer.Option(help="Folder with chat.* and pretrain.*")],
    out: Annotated[Path, typer.Option(help="Folder of the run; continues an earlier run")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.model, for models of pieces")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="End after this much training")] = None,
    steps: Annotated[int | None, typer.Option(help="End after this many steps")] = None,
    batch: Annotated[int, typer.Option(help="Rows per step")] = 8,
    width: Annotated[int, typer.Option(help="Ids per row, one more than the context")] = 513,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    bf16: Annotated[bool, typer.Option(help="Matrix products in bfloat16")] = True,
    talk_only: Annotated[bool, typer.Option(help="Learn from conversations alone")] = False,
    greet: Annotated[float, typer.Option(help="Factor on the frequency of greetings")] = 1.0,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints")] = 300.0,
    seed: int = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads")] = None,
    vocab: Annotated[int, typer.Option(help="Pieces, for tokenizer")] = 4096,
    teacher: Annotated[
        Path | None, typer.Option(help="For draft: floating bundle or checkpoint to learn from")
    ] = None,
    talks: Annotated[
        list[Path] | None, typer.Option(help="With --teacher: its talks (edge.apps.demo.answers)")
    ] = None,
    overlap: Annotated[
        float, typer.Option(help="With --teacher: weight of the loss of rejected tokens")
    ] = SHARES.overlap,
    choice: Annotated[
        float, typer.Option(help="With --teacher: weight of the loss of its likeliest token")
    ] = SHARES.choice,
    start: Annotated[
        Path | None, typer.Option(help="Floating bundle or checkpoint to start from")
    ] = None,
) -> None:
    """Train the tokenizer or a model. Stop at any time; the same command continues."""
    if threads:
        torch.set_num_threads(threads)
    if what is What.TOKENIZER:
        print(train_tokenizer(data, out, vocab))
        return
    if steps is None and minutes is None:
        raise typer.BadParameter("give --steps or --minutes")
    if what.value in BYTES:
        tokenizer = None
    elif tokenizer is None:
        raise typer.BadParameter("--tokenizer is needed")
    if (teacher is None) != (talks is None):
        raise typer.BadParameter("--teacher and --talks go together")
    taught = None
    if teacher and talks:
        shares = Shares(1 - overlap - choice, overlap, choice)
        taught = Taught(teacher, tuple(talks), out / "lessons", shares)
    plan = TrainingPlan(
        width, batch, steps, minutes, seed, device, bf16, talk_only, greet, save_every,
        taught=taught, start=start,
    )  # fmt: skip
    card = train(config_for(what.value), data, out, plan, tokenizer)
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    typer.run(main)
