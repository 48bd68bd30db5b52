"""`edge profile BUNDLE`: time, memory and energy of an answer, and a breakdown of the time."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import options
from edge.apps.programs import grouped
from edge.apps.terminal import say
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.apps.profile import drafts
    from edge.apps.profile.run import ProfileResult

MOST = 1 << 20  # maximum tokens of a prompt or a context
_lengths_option = partial(typer.Option, rich_help_panel="What is measured")
_output_option = partial(typer.Option, rich_help_panel="Output")


@grouped
def profile(
    bundle: options.BundleName,
    *,
    prompt: Annotated[str | None, _lengths_option(
        "-p", "--prompt-tokens", metavar="N,…", help="Lengths of prompts. [default: 512]")] = None,
    generated: Annotated[int, _lengths_option(
        "-n", "--generated-tokens", min=1, max=MOST, metavar="N",
        help="Tokens in an answer.")] = 128,
    context: Annotated[str | None, _lengths_option(
        metavar="N,…", help="Context lengths to time a step at; 0 for none. "
        "[default: 128 to 4096]")] = None,
    repetitions: Annotated[int, _lengths_option(
        "-r", "--repetitions", min=1, max=10_000, metavar="N",
        help="Repetitions of every length.")] = 5,
    warmup: Annotated[int, _lengths_option(
        min=0, max=1000, metavar="N", help="Repetitions that do not count.")] = 1,
    against: Annotated[str | None, _lengths_option(
        metavar="OTHER", help="Bundle, or engine for this bundle, to compare with.")] = None,
    breakdown: Annotated[bool, _lengths_option(
        help="Break down the time by op, and measure memory bandwidth.")] = True,
    drafting: options.DraftingOptions,
    draft_prompts: Annotated[Path | None, _lengths_option(
        metavar="FILE", help="Prompts for --draft, one per line, or JSON lines. "
        "[default: four built-in prompts]")
    ] = None,
    running: options.RunOptions,
    temperature: Annotated[float, options.running(min=0, max=100, help="0 is greedy.")] = 0.0,
    as_json: options.AsJson = False,
    as_lines: Annotated[bool, _output_option(
        "--jsonl", help="Print a JSON object for each repetition.")] = False,
    html: Annotated[Path | None, _output_option(
        metavar="FILE", help="Also write an HTML page, with charts if matplotlib is installed.",
    )] = None,
) -> None:  # fmt: skip
    """Measure TTFT, TPOT, inter-token latency, tokens/s, memory and energy.

    Prompts are random token ids. Times include sampling, which is greedy, but
    not tokenization. Only the table, or JSON, goes to stdout.

    docs/use/profile.md defines every figure.
    """
    if as_json and as_lines:
        raise InputError(
            "cannot be given together with --jsonl", field="--json", remedy="choose one"
        )
    if html is not None:
        _check_writable(html)
    draft_options = drafting.read({"--draft-prompts": draft_prompts})
    draft_request = _read_draft_request(draft_options, draft_prompts, against)
    if draft_request and as_lines:
        raise InputError("is not supported by --jsonl", field="--draft", remedy="use --json")
    from edge.apps.profile import report, run

    depths = None if context is None else () if context == "0" else _lengths(context, "--context")
    request = run.ProfileRequest(
        bundle=bundle,
        against=against,
        **vars(running),
        prompts=None if prompt is None else _lengths(prompt, "-p"),
        generated=generated,
        repetitions=repetitions,
        warmup=warmup,
        contexts=depths,
        temperature=temperature,
        explain=breakdown,
        draft=draft_request,
    )
    options.all_there([name for name, _ in request.sides.values()])
    result = run.profile(request, lambda text: say(text, file=sys.stderr))
    facts = report.to_dict(result)
    if html is not None:
        _write_page(html, facts, result)
    if as_json:
        say(json.dumps(facts, indent=1, allow_nan=False))
    elif as_lines:
        for line in report.lines(result):
            say(json.dumps(line, allow_nan=False))
    else:
        from edge.apps.measure.table import show
        from edge.apps.profile.words import parts

        show(parts(facts))


def _read_draft_request(
    drafting: options.DraftOptions, prompts: Path | None, against: str | None
) -> drafts.DraftRequest | None:
    """Return the drafting options. Raises InputError for options that exclude each other."""
    if drafting.draft is None:
        return None
    if against is not None:
        raise InputError(
            "is already compared with no drafting", field="--draft", remedy="leave out --against"
        )
    from edge.apps.profile import drafts
    from edge.apps.prompts import DEFAULT, read_prompts

    texts = DEFAULT if prompts is None else read_prompts(prompts)
    source = "built in" if prompts is None else prompts.name
    return drafts.DraftRequest(
        drafting.draft, drafting.tokens, drafting.tree, texts, source, drafting.accept
    )


def _lengths(text: str, option: str) -> tuple[int, ...]:
    """Parse `128,512`. Keep the order, drop duplicates. Raises InputError."""
    lengths = list(dict.fromkeys(options.numbers(text, int, option, f"{option} 128,512")))
    if min(lengths) < 1 or max(lengths) > MOST:
        raise InputError(f"lengths are 1 to {MOST}, not {text:.60}", field=option)
    return tuple(lengths)


def _check_writable(path: Path) -> None:
    """Raise InputError for an unwritable path before a long measurement, not after it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            "cannot be written",
            file=path,
            field="--html",
            remedy="name a file in a folder that you can write to",
        )


def _write_page(path: Path, facts: dict[str, Any], result: ProfileResult) -> None:
    from edge.apps.measure import plots
    from edge.apps.profile import page

    if not plots.available():
        say(page.NO_PICTURES, file=sys.stderr)
    options.write_text(path, page.render(facts, result), "--html")
