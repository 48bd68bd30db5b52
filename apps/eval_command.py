"""`edge eval BUNDLE TEXT…`: how good a model is, and how far one bundle is from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

READING, COMPARING = "How text is read", "Comparing"


def evaluate(
    bundle: Annotated[str, typer.Argument(help="Bundle folder, or the name of a demonstration.")],
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TEXT…", help="Text files, or .jsonl with messages or text."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; one per core when not given.")
    ] = None,
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
        int | None, typer.Option(min=2, help="Read no more than this.", rich_help_panel=READING)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="BUNDLE", help="Also this bundle, as the truth: KL divergence, agreement.",
            rich_help_panel=COMPARING,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Measure perplexity and bits per byte on any text.

    A text file holds one document, or several that end with a line
    <|endoftext|>; a .jsonl file holds a conversation a line, of which the
    messages are predicted. Every document begins with an empty state.

    Text that is longer than a window is read in overlapping windows, the usual
    recipe; --stream reads it as a recurrent model does in use.

    docs/evaluation.md defines every figure.
    """
    from edge.apps.evaluate import modes, report

    request = modes.Request(bundle, texts or (), threads, window, stride, stream, max_tokens)
    facts = modes.perplexity(request) if against is None else modes.divergence(request, against)
    print(json.dumps(facts, indent=1) if as_json else report.describe(facts))
