"""`edge profile BUNDLE`: what an answer costs in time, memory and energy, and where time goes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.apps import draft_options
from edge.errors import InputError
from edge.runtime import ort_providers

if TYPE_CHECKING:
    from edge.apps.profiling import drafts

LENGTHS, RUNNING, OUTPUT = "What is measured", "How it runs", "Output"
DRAFTING = "Drafting, against none"
MOST = 1 << 20  # tokens of a prompt or a context


def profile(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of a demonstration.")],
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p", "--prompt-tokens", metavar="N,…", help="Lengths of prompts; 512.",
            rich_help_panel=LENGTHS,
        ),
    ] = None,
    generated: Annotated[
        int, typer.Option("-n", "--generated-tokens", min=1, max=MOST, metavar="N",
                          help="Tokens of an answer.", rich_help_panel=LENGTHS),
    ] = 128,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N,…", help="Depths to time a step at; 128 to 4096. 0 leaves it out.",
            rich_help_panel=LENGTHS,
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("-r", "--repetitions", min=1, max=10_000, metavar="N",
                          help="Of every length.", rich_help_panel=LENGTHS),
    ] = 5,
    warmup: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Repetitions that do not count.",
                          rich_help_panel=LENGTHS),
    ] = 1,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER", help="Another bundle, or another engine for this one, in turn.",
            rich_help_panel=LENGTHS,
        ),
    ] = None,
    breakdown: Annotated[
        bool,
        typer.Option(help="Where the time goes, and the bandwidth it is compared with.",
                     rich_help_panel=LENGTHS),
    ] = True,
    draft: Annotated[
        str | None,
        typer.Option(metavar="BUNDLE", help="Who drafts: another bundle, or ngram.",
                     rich_help_panel=DRAFTING),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens of every draft, one after the other.",
                                 rich_help_panel=DRAFTING),
    ] = None,
    draft_tree: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Children at each depth of every draft.",
                                 rich_help_panel=DRAFTING),
    ] = None,
    draft_auto: Annotated[
        bool,
        typer.Option("--draft-auto", help="Find the shape of drafts by trying; the default.",
                     rich_help_panel=DRAFTING),
    ] = False,
    accept: Annotated[
        str,
        typer.Option(metavar=draft_options.ACCEPT_METAVAR, help=draft_options.ACCEPT_HELP,
                     rich_help_panel=DRAFTING),
    ] = "exact",
    draft_prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts, one a line, or JSON lines; four of our own.",
                     rich_help_panel=DRAFTING),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="auto, ort, cuda or tensorrt.", rich_help_panel=RUNNING)
    ] = "auto",
    provider: Annotated[
        str | None, typer.Option(help=ort_providers.HELP, rich_help_panel=RUNNING)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; else one per core, small models one.",
                                 rich_help_panel=RUNNING),
    ] = None,
    spin: Annotated[
        bool, typer.Option("--spin", help="Threads wait awake, for a machine of its own.",
                           rich_help_panel=RUNNING),
    ] = False,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="0 is greedy.", rich_help_panel=RUNNING)
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)
    ] = False,
    as_lines: Annotated[
        bool, typer.Option("--jsonl", help="Print a JSON object for each repetition.",
                           rich_help_panel=OUTPUT),
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write one page with pictures.",
                                  rich_help_panel=OUTPUT),
    ] = None,
) -> None:  # fmt: skip
    """Measure TTFT, TPOT, inter-token latency, tokens/s, memory and energy.

    Prompts are random token ids, sampling is greedy and inside the times,
    tokenization is not. Nothing but the table, or JSON, goes to stdout.

    docs/profiling.md defines every figure.
    """
    if as_json and as_lines:
        raise InputError("goes without --jsonl", field="--json", remedy="one at a time")
    if html is not None:
        _check_writable(html)
    options = draft_options.read(
        draft, draft_tokens, draft_tree, draft_auto, accept, {"--draft-prompts": draft_prompts}
    )
    drafting = _drafting(options, draft_prompts, against)
    if drafting and as_lines:
        raise InputError("has no line in --jsonl", field="--draft", remedy="--json")
    from edge.apps.profiling import report, run

    request = run.Request(
        bundle=bundle,
        against=against,
        engine=engine,
        provider=provider,
        threads=threads,
        spin=spin,
        prompts=None if prompt is None else _lengths(prompt, "-p"),
        generated=generated,
        repetitions=repetitions,
        warmup=warmup,
        contexts=None if context is None else () if context == "0" else _lengths(
            context, "--context"
        ),
        temperature=temperature,
        explain=breakdown,
        draft=drafting,
    )  # fmt: skip
    result = run.profile(request, lambda text: print(text, file=sys.stderr))
    facts = report.to_dict(result)
    if html is not None:
        _write_page(html, facts, result)
    if as_json:
        print(json.dumps(facts, indent=1, allow_nan=False))
    elif as_lines:
        for line in report.lines(result):
            print(json.dumps(line, allow_nan=False))
    else:
        from rich.console import Console

        from edge.apps.profiling import table

        # a table that is piped somewhere is not to be folded
        console = Console() if sys.stdout.isatty() else Console(width=160)
        table.show(facts, console)


def _drafting(
    options: draft_options.DraftOptions, prompts: Path | None, against: str | None
) -> drafts.Request | None:
    """What `--draft…` ask for. Raises InputError: options that do not go together."""
    if options.draft is None:
        return None
    if against is not None:
        raise InputError(
            "is measured against no drafting", field="--draft", remedy="leave out --against"
        )
    from edge.apps.profiling import drafts
    from edge.apps.prompts import DEFAULT, read_prompts

    texts = DEFAULT if prompts is None else read_prompts(prompts)
    source = "of its own" if prompts is None else prompts.name
    return drafts.Request(
        options.draft, options.tokens, options.tree, texts, source, options.accept
    )


def _lengths(text: str, option: str) -> tuple[int, ...]:
    """`128,512`: in this order, each once. Raises InputError."""
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(
            f"{text!r:.60} is no list of whole numbers", field=option, remedy=f"{option} 128,512"
        ) from None
    if min(found) < 1 or max(found) > MOST:
        raise InputError(f"lengths are 1 to {MOST}, not {text:.60}", field=option)
    return tuple(found)


def _check_writable(path: Path) -> None:
    """Refuse before measuring for a minute, not after it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            "cannot be written",
            file=path,
            field="--html",
            remedy="name a file in a folder of yours",
        )


def _write_page(path: Path, facts: dict[str, object], result: object) -> None:
    from edge.apps.profiling import page, run

    assert isinstance(result, run.Result)
    try:
        path.write_text(page.render(facts, result), encoding="utf-8")
    except OSError as problem:
        raise InputError(
            f"cannot be written: {problem.strerror}", file=path, field="--html"
        ) from problem
