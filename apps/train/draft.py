"""`edge train draft --teacher TEACHER -o DRAFT --text FILE…`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.apps import options
from edge.apps.distill import (
    Bf16,
    Device,
    LearnedText,
    Minutes,
    Recompute,
    SaveEvery,
    TokenizerFile,
    Tokens,
    TrainingThreads,
    ValidText,
    learns,
    needs_training,
    picture_of,
    tell,
    use_threads,
)
from edge.apps.terminal import say

if TYPE_CHECKING:
    from edge.export.distill.drafting import DrafterSummary


def draft(
    teacher: Annotated[
        str, typer.Option(help="Checkpoint of the target: a Transformer, or any other model.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder of the drafter; OUTPUT.run is beside it.")
    ],
    text: LearnedText,
    mixer: Annotated[str, typer.Option(help="mamba2 or mamba.")] = "mamba2",
    layers: Annotated[int, typer.Option(help="How many.")] = 4,
    rank: Annotated[
        int, typer.Option(help="Width; of the factor of the target's head that is its own, too.")
    ] = 128,
    valid: ValidText = None,
    tokenizer: TokenizerFile = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    train_ends: Annotated[
        bool, learns("--train-ends", help="Let the factor of the target's head learn too.")
    ] = False,
    choice: Annotated[
        float, learns(help="Share of the loss that is the target's likeliest token.")
    ] = 0.2,
    overlap: Annotated[float, learns(help="Share that is drafts refused at temperature 1.")] = 0.0,
    label: Annotated[float, learns(help="Share that is the text; the rest is the target.")] = 0.0,
    length: Annotated[int, learns(help="Tokens of a row.")] = 256,
    batch: Annotated[int, learns(help="Rows of a step.")] = 8,
    rate: Annotated[float, learns(help="Factor on the learning rates.")] = 1.0,
    seed: Annotated[int, learns(help="Of first weights and the order of the text.")] = 0,
    device: Device = "cpu",
    bf16: Bf16 = None,
    recompute: Recompute = False,
    threads: TrainingThreads = None,
    save_every: SaveEvery = 900.0,
    as_json: options.AsJson = False,
) -> None:
    """Train a small Mamba to propose a target's tokens; the same command continues."""
    from edge.runtime.model import resolve

    with needs_training():
        from edge.export.distill.drafting import train_drafter
        from edge.export.distill.options import DrafterOptions
    use_threads(threads)
    asked = DrafterOptions(
        text=tuple(text), mixer=mixer, layers=layers, rank=rank, valid=valid, tokenizer=tokenizer,
        tokens=tokens, minutes=minutes, train_ends=train_ends, choice=choice, overlap=overlap,
        label=label, length=length, batch=batch, rate=rate, seed=seed, device=device, bf16=bf16,
        recompute=recompute, save_every=save_every,
    )  # fmt: skip
    summary = train_drafter(resolve(teacher), output, asked, tell, picture_of)
    say(json.dumps(summary.to_dict(), indent=1) if as_json else describe(summary))


def describe(summary: DrafterSummary) -> str:
    """What was made, in a few lines."""
    found = summary.figures
    return "\n".join([
        f"{summary.path}: {summary.parameters / 1e6:.1f} M parameters",
        f"  learned     {summary.tokens} tokens in {summary.seconds / 60:.1f} minutes",
        f"  target      same choice {found['same_choice']:.1%}, in common "
        f"{found['overlap']:.1%}, KL {found['kl']:.4f} nats a token",
        f"  curve       {summary.run / 'curve.csv'}",
        f"next: edge export {summary.path} -o DRAFT --quant w8, then edge run NAME --draft DRAFT",
    ])  # fmt: skip
