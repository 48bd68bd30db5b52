"""`edge distill TEACHER -o HYBRID --text FILE…`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import options
from edge.apps.measure import plots
from edge.apps.terminal import say
from edge.errors import ExportError, InputError

if TYPE_CHECKING:
    from edge.export.distill.run import DistillSummary

_TRAINING, _MEMORY = "How it learns", "Where it runs"


def learns(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_TRAINING, **more)


def _runs(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=_MEMORY, **more)


LearnedText = Annotated[
    list[Path],
    typer.Option(help="What to learn from: UTF-8, or .jsonl with messages or text. Repeat it."),
]
ValidText = Annotated[
    Path | None, typer.Option(help="Text to measure on. [default: a few rows of --text]")
]
TokenizerFile = Annotated[
    Path | None, typer.Option(help="Tokenizer file or folder, when the teacher has none.")
]
Tokens = Annotated[
    int | None, learns(help="Tokens to learn from. [default: once through the text]")
]
Minutes = Annotated[
    float | None, learns(help="End after so many, over all runs that continue one another.")
]
Device = Annotated[str, _runs(help="cpu, cuda, cuda:1, …")]
Bf16 = Annotated[
    bool | None,
    _runs("--bf16/--fp32", help="Products in bfloat16. [default: where the device has them]"),
]
Recompute = Annotated[
    bool, _runs("--recompute", help="Run layers again rather than keep what gradients need.")
]
TrainingThreads = Annotated[int | None, _runs(min=1, help="CPU threads. [default: all]")]
SaveEvery = Annotated[float, _runs(help="Seconds between what the run can continue from.")]


@contextmanager
def needs_training() -> Iterator[None]:
    """Say how to get the packages of training, where one that is imported inside is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ExportError(
            f"distilling needs the package {missing.name}",
            remedy="pip install 'mamba-edge[export]'; in a checkout, make test does",
        ) from None


def use_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def tell(line: str) -> None:
    say(line, file=sys.stderr, flush=True)


def distill(
    teacher: Annotated[
        str, typer.Argument(help="Checkpoint of a Transformer: Llama, Mistral and their kin.")
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder of the hybrid; OUTPUT.run lies beside it."),
    ],
    text: LearnedText,
    keep_attention: Annotated[
        str | None,
        typer.Option(
            help="Share of blocks that keep attention; 0.75,0.5 goes there in two phases."
            " [default: 0.5]"
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(help="Which blocks lose it: even, measured (the cheapest), or 0,2,5-9."),
    ] = "even",
    mixer: Annotated[str, typer.Option(help="What takes its place: mamba2.")] = "mamba2",
    valid: ValidText = None,
    tokenizer: TokenizerFile = None,
    tokens: Tokens = None,
    minutes: Minutes = None,
    match: Annotated[
        float, learns(help="Share of the run in which mixers learn their attention's outputs.")
    ] = 0.5,
    train_all: Annotated[
        bool, learns("--train-all", help="Then train everything, not the new mixers alone.")
    ] = False,
    label: Annotated[
        float, learns(help="Share of that loss which is the text; the rest is the teacher.")
    ] = 0.0,
    fresh: Annotated[
        bool, learns("--fresh", help="Begin with random mixers, to see what attention's bring.")
    ] = False,
    length: Annotated[int, learns(help="Tokens of a row.")] = 512,
    batch: Annotated[int, learns(help="Rows of a step.")] = 8,
    rate: Annotated[float, learns(help="Factor on the learning rates.")] = 1.0,
    seed: Annotated[int, learns(help="Of the order of the text.")] = 0,
    device: Device = "cpu",
    bf16: Bf16 = None,
    recompute: Recompute = False,
    threads: TrainingThreads = None,
    save_every: SaveEvery = 900.0,
    as_json: options.AsJson = False,
) -> None:
    """Make a hybrid of Mamba-2 and attention of a Transformer; the same command continues."""
    from edge.runtime.model import resolve

    with needs_training():
        from edge.export.distill.options import DistillOptions
        from edge.export.distill.run import distill as run
    use_threads(threads)
    asked = DistillOptions(
        text=tuple(text), keep=_shares(keep_attention, layers), layers=layers, mixer=mixer,
        tokens=tokens, minutes=minutes, match=match, fresh=fresh, length=length, batch=batch,
        train_all=train_all, label=label, rate=rate, valid=valid, tokenizer=tokenizer,
        device=device, bf16=bf16, recompute=recompute, seed=seed, save_every=save_every,
    )  # fmt: skip
    summary = run(resolve(teacher), output, asked, tell, picture_of)
    say(json.dumps(summary.to_dict(), indent=1) if as_json else describe(summary))


def _shares(text: str | None, layers: str) -> tuple[float, ...]:
    """`--keep-attention` as numbers. Raises InputError; with blocks that are named, too."""
    if text is None:
        return (0.5,)
    if layers not in ("even", "measured"):
        raise InputError(
            "says which blocks lose attention, so --keep-attention has nothing to say",
            field="--layers", remedy="leave one of them out",
        )  # fmt: skip
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{text!r:.60} is not made of numbers", field="--keep-attention", remedy="such as 0.5"
        ) from None


def picture_of(points: Sequence[dict[str, Any]]) -> str | None:
    """The learning curve over tokens, as a file; None without matplotlib."""
    if not plots.available():
        return None
    series = {
        "matching: squared error": [
            (p["tokens"], p["loss"]) for p in points if p["name"] == "match"
        ],
        "learning: loss, nats a token": [
            (p["tokens"], p["loss"]) for p in points if p["name"] == "learn"
        ],
        "KL to the teacher, held out": [
            (p["tokens"], p["kl"]) for p in points if p["name"] == "valid" and p["kl"] > 0
        ],
    }
    with plots.picture(inline=False) as made:
        for style, (name, values) in zip(("-", "-", "o--"), series.items(), strict=True):
            if values:
                made.axes.plot(*zip(*values, strict=True), style, label=name)
        made.axes.set_yscale("log")
        made.axes.set_xlabel("tokens learned from")
        made.axes.grid(True)
        made.axes.legend()
    return made.svg


def describe(summary: DistillSummary) -> str:
    """What was made, in a few lines."""
    figures, gone = summary.figures, len(summary.replaced)
    lines = [
        f"{summary.path}",
        f"  attention   kept in {summary.blocks - gone} of {summary.blocks} blocks; replaced: "
        f"{', '.join(map(str, summary.replaced)) or 'none'}",
        f"  learned     {summary.tokens} tokens in {summary.seconds / 60:.1f} minutes",
        f"  perplexity  {figures['perplexity']:.4g}, teacher {figures['teacher_perplexity']:.4g} "
        f"({figures['perplexity_ratio']:.3f}×)",
        f"  teacher     KL {figures['kl']:.4f} nats a token, same choice "
        f"{figures['same_choice']:.1%}",
    ]
    if summary.costs:
        told = ", ".join(f"{block}: {cost:.4f}" for block, cost in summary.costs.items())
        lines.append(f"  cost        KL of each block alone: {told}")
    lines += [
        f"  curve       {summary.run / 'curve.csv'}",
        f"next: edge export {summary.path} -o BUNDLE",
    ]
    return "\n".join(lines)
