"""`edge eval BUNDLE TEXT…`: perplexity of a model, and divergence between two bundles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edge.apps import options
from edge.apps.terminal import say
from edge.errors import Faults, InputError

# copied from `noise`, which is not imported for the help text
KINDS = ("drop", "repeat", "antspeak", "uppercase", "random-case", "swap")
_reading_option = partial(typer.Option, rich_help_panel="How text is read")
_comparison_option = partial(typer.Option, rich_help_panel="Comparing")
_noise_option = partial(typer.Option, rich_help_panel="Noise")
_tasks_option = partial(typer.Option, rich_help_panel="Tasks")


def evaluate(
    bundle: options.BundleName,
    texts: Annotated[list[Path] | None, typer.Argument(
        metavar="TEXT…", help="Text files, or .jsonl with messages or text.")] = None,
    as_json: options.AsJson = False,
    threads: options.Threads = None,
    engine: options.Engine = "auto",
    provider: options.Provider = None,
    window: Annotated[int | None, _reading_option(
        help="Tokens in a window. "
        "[default: the context attention was trained for, else 2048]")] = None,
    stride: Annotated[int | None, _reading_option(
        help="Tokens from one window to the next. [default: half a window]")] = None,
    stream: Annotated[bool, _reading_option("--stream",
        help="Read each document in one pass, carrying the state, without windows.")] = False,
    max_tokens: Annotated[int | None, _reading_option(
        min=2, help="Stop after this many predicted tokens.")] = None,
    against: Annotated[str | None, _comparison_option(metavar="BUNDLE",
        help="Reference bundle: print KL divergence from it and agreement with it.")] = None,
    layers: Annotated[bool, _comparison_option("--layers",
        help="With --against: signal-to-noise ratio of every layer.")] = False,
    sensitivity: Annotated[bool, _comparison_option("--sensitivity",
        help="With --against a floating-point bundle: cost of each rounding alone.")] = False,
    each_layer: Annotated[bool, _comparison_option("--each-layer",
        help="With --sensitivity: list every layer separately.")] = False,
    svg: Annotated[Path | None, _comparison_option(metavar="FILE",
        help="With --sensitivity: also write a chart; needs matplotlib.")] = None,
    noise: Annotated[str | None, _noise_option(metavar="KIND",
        help=f"Corrupt every other 100 words: {', '.join(KINDS)}, or all.")] = None,
    probability: Annotated[float | None, _noise_option(min=0, max=1,
        help="Probability that a character is corrupted. [default: 0.05 and 0.3]")] = None,
    seed: Annotated[int | None, _noise_option(
        help="Seed of the noise. [default: 0]")] = None,
    tasks: Annotated[str | None, _tasks_option(metavar="TASK,…",
        help="Run tasks of lm-evaluation-harness instead of reading a text.")] = None,
    task_path: Annotated[Path | None, _tasks_option(
        help="Folder of your own task files.")] = None,
    limit: Annotated[int | None, _tasks_option(min=1,
        help="Number of questions per task. [default: all]")] = None,
    fewshot: Annotated[int | None, _tasks_option(min=0,
        help="Examples before each question.")] = None,
    chat: Annotated[bool, _tasks_option("--chat", help="Apply the chat template.")] = False,
) -> None:  # fmt: skip
    """Measure perplexity and bits per byte on any text.

    A text file holds one document, or several, each ended by a line
    <|endoftext|>. A .jsonl file holds one conversation per line, and only its
    messages are predicted. Every document starts from an empty state.

    Text longer than a window is read in overlapping windows, the usual
    recipe. --stream reads it in one pass, as a recurrent model runs in use.

    docs/use/evaluate.md defines every figure.
    """
    from edge.apps.evaluate import modes, report
    from edge.apps.measure import plots
    from edge.apps.measure.table import show

    options.check_engine(engine, provider)
    request = modes.EvalRequest(
        bundle, texts or (), threads, window, stride, stream, max_tokens, engine, provider
    )
    faults = Faults()
    _check_exclusive(faults, {"--against": against, "--noise": noise, "--tasks": tasks})
    _check_exclusive(faults, {"--layers": layers, "--sensitivity": sensitivity})
    task_options = {"--task-path": task_path, "--limit": limit, "--fewshot": fewshot}
    comparison_options = {"--layers": layers or None, "--sensitivity": sensitivity or None}
    _require(faults, "--tasks", tasks, task_options | {"--chat": chat or None})
    _require(faults, "--noise", noise, {"--probability": probability, "--seed": seed})
    _require(faults, "--against", against, comparison_options)
    _require(
        faults, "--sensitivity", sensitivity, {"--each-layer": each_layer or None, "--svg": svg}
    )
    if svg is not None and not plots.available():
        faults.add("--svg", "needs the package matplotlib", plots.REMEDY)
    faults.refuse(InputError)
    options.all_there([bundle, *([] if against is None else [against])], texts or ())
    if noise is not None:
        facts = modes.robustness(request, noise, probability, seed or 0)
    elif tasks is not None:
        facts = modes.tasks(
            request, tasks, folder=task_path, limit=limit, fewshot=fewshot, chat=chat
        )
    elif against is None:
        facts = modes.perplexity(request)
    elif layers:
        facts = modes.divergence_of_layers(request, against)
    elif sensitivity:
        facts = modes.sensitivity(request, against, each_layer)
        if svg is not None:
            options.write_text(svg, report.draw(facts), "--svg")
    else:
        facts = modes.divergence(request, against)
    if as_json:
        say(json.dumps(facts, indent=1, allow_nan=False))
    else:
        show(report.parts(facts))


def _check_exclusive(faults: Faults, options: Mapping[str, object]) -> None:
    """Record a fault for each option that excludes another given one."""
    first, *others = [name for name, value in options.items() if value] or [""]
    for other in others:
        faults.add(first, f"cannot be given together with {other}", "choose one")


def _require(faults: Faults, option: str, value: object, others: Mapping[str, object]) -> None:
    """Record a fault for each option given without the option it depends on."""
    for name, other in others.items():
        if other is not None and not value:
            faults.add(name, f"needs {option}")
