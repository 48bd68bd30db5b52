"""`edge train draft --teacher TEACHER -o DRAFT --text FILE…`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from edge.apps import exporter
from edge.apps.learning import Label, Learning, learns, picture_of, report
from edge.apps.options import named_as_options
from edge.apps.programs import grouped


@dataclass(frozen=True, kw_only=True)
class _DrafterLearning(Learning):
    length: Annotated[int, learns(help="Tokens per row.")] = 256


@grouped
def draft(
    teacher: Annotated[
        str, typer.Option(help="Checkpoint of the target: a Transformer, or any other model.")
    ],
    learning: _DrafterLearning,
    mixer: Annotated[str, typer.Option(help="Mixer: mamba2, mamba, or attention.")] = "mamba2",
    layers: Annotated[
        int, typer.Option(help="Number of layers; half of them are MLPs with attention.")
    ] = 4,
    rank: Annotated[
        int, typer.Option(help="Width of the drafter, and rank of its factor of the target's head.")
    ] = 128,
    head: Annotated[
        int | None,
        typer.Option(help="Tokens it can draft: the most frequent of the text. [default: all]"),
    ] = None,
    train_ends: Annotated[
        bool, learns("--train-ends", help="Train the factor of the target's head too.")
    ] = False,
    choice: Annotated[
        float, learns(help="Share of the loss on the target's likeliest token.")
    ] = 0.2,
    overlap: Annotated[
        float, learns(help="Share of the loss on drafts rejected at temperature 1.")
    ] = 0.0,
    label: Label = 0.0,
) -> None:
    """Train a small Mamba, or Transformer, to draft for a target. Run it again to resume."""
    exporter.needs("training")
    from edge.export.distill.drafting import DrafterTraining
    from edge.export.distill.options import DrafterOptions

    options = DrafterOptions(
        mixer=mixer, layers=layers, rank=rank, head=head, train_ends=train_ends, choice=choice,
        overlap=overlap, label=label, **learning.asked(),
    )  # fmt: skip
    source = learning.checkpoint(teacher)
    with named_as_options():
        summary = DrafterTraining(source, learning.output, options, report, picture_of).run()
    figures, exporting = summary.figures, learning.export_words(summary.path)
    learning.tell(
        summary,
        f"{summary.path}: {summary.parameters / 1e6:.1f} M parameters",
        f"  target      same choice {figures['same_choice']:.1%}, in common "
        f"{figures['overlap']:.1%}, KL {figures['kl']:.4f} nats a token",
        f"next: {exporting} --quant w8, then edge run NAME --draft BUNDLE",
    )
