"""`edge eval BUNDLE TEXT…`: how good a model is, and how far one bundle is from another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from edge.errors import InputError
from edge.runtime import ort_providers

READING, COMPARING, NOISE, TASKS = "How text is read", "Comparing", "Noise", "Tasks"
KINDS = ("drop", "repeat", "antspeak", "uppercase", "random-case", "swap")


def evaluate(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of a demonstration.")],
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TEXT…", help="Text files, or .jsonl with messages or text."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; else one per core, small models one.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, ort, cuda or tensorrt; what it is compared with is on auto.")
    ] = "auto",
    provider: Annotated[str | None, typer.Option(help=ort_providers.HELP)] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a window; the context attention was trained for, else 2048.",
            rich_help_panel=READING,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="By how many tokens a window moves on; half a window.", rich_help_panel=READING
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="No windows: a document in one go, the state carried through.",
            rich_help_panel=READING,
        ),
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Stop after this many tokens.", rich_help_panel=READING),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="BUNDLE", help="Also this bundle, as the truth: KL divergence, agreement.",
            rich_help_panel=COMPARING,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers", help="With --against: signal to noise of every layer.",
            rich_help_panel=COMPARING,
        ),
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="With --against a floating bundle: what each rounding costs alone.",
            rich_help_panel=COMPARING,
        ),
    ] = False,
    each_layer: Annotated[
        bool,
        typer.Option(
            "--each-layer", help="With --sensitivity: not all layers of a kind together.",
            rich_help_panel=COMPARING,
        ),
    ] = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --sensitivity: also draw it.", rich_help_panel=COMPARING
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            metavar="KIND", help=f"Spoil every other 100 words: {', '.join(KINDS)}, or all.",
            rich_help_panel=NOISE,
        ),
    ] = None,
    probability: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Of a character to be spoilt; 0.05 and 0.3.", rich_help_panel=NOISE
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the random numbers of the noise; 0.", rich_help_panel=NOISE),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,…", help="Tasks of lm-evaluation-harness, instead of a text.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    task_path: Annotated[
        Path | None,
        typer.Option(help="Folder of task files of your own.", rich_help_panel=TASKS),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Questions of each task; all.", rich_help_panel=TASKS),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(min=0, help="Examples before a question.", rich_help_panel=TASKS),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask through the chat template.", rich_help_panel=TASKS),
    ] = False,
) -> None:  # fmt: skip
    """Measure perplexity and bits per byte on any text.

    A text file holds one document, or several that end with a line
    <|endoftext|>; a .jsonl file holds a conversation a line, of which the
    messages are predicted. Every document begins with an empty state.

    Text that is longer than a window is read in overlapping windows, the usual
    recipe; --stream reads it as a recurrent model does in use.

    docs/use/evaluate.md defines every figure.
    """
    from edge.apps.evaluate import modes, picture, report
    from edge.runtime.engines import check_provider

    check_provider(engine, provider)
    request = modes.Request(
        bundle, texts or (), threads, window, stride, stream, max_tokens, engine, provider
    )
    _one_of({"--against": against, "--noise": noise, "--tasks": tasks})
    _one_of({"--layers": layers, "--sensitivity": sensitivity})
    asked = {"--task-path": task_path, "--limit": limit, "--fewshot": fewshot}
    _needs("--tasks", tasks, asked | {"--chat": chat or None})
    _needs("--noise", noise, {"--probability": probability, "--seed": seed})
    _needs("--against", against, {"--layers": layers or None, "--sensitivity": sensitivity or None})
    _needs("--sensitivity", sensitivity, {"--each-layer": each_layer or None, "--svg": svg})
    if noise is not None:
        facts = modes.robustness(request, noise, probability, seed or 0)
        describe = report.describe_noise
    elif tasks is not None:
        facts = modes.tasks(
            request, tasks, folder=task_path, limit=limit, fewshot=fewshot, chat=chat
        )
        describe = report.describe_tasks
    elif against is None:
        facts, describe = modes.perplexity(request), report.describe
    elif layers:
        facts, describe = modes.divergence_of_layers(request, against), report.describe_layers
    elif sensitivity:
        facts = modes.sensitivity(request, against, each_layer)
        describe = report.describe_sensitivity
        if svg is not None:
            _write(svg, picture.draw(facts))
    else:
        facts, describe = modes.divergence(request, against), report.describe
    print(json.dumps(facts, indent=1, allow_nan=False) if as_json else describe(facts))


def _one_of(options: Mapping[str, object]) -> None:
    """Refuse two ways to evaluate at once."""
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise InputError(f"goes without {given[1]}", field=given[0], remedy="one at a time")


def _needs(option: str, value: object, others: Mapping[str, object]) -> None:
    """Refuse options that mean something only beside another."""
    given = [name for name, other in others.items() if other is not None]
    if given and not value:
        raise InputError(f"goes with {option} only", field=given[0])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as problem:
        raise InputError(
            f"cannot be written: {problem.strerror}", file=path, field="--svg"
        ) from None
