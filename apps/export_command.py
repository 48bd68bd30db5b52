"""`edge export CHECKPOINT -o BUNDLE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge.apps.units import megabytes
from edge.errors import ExportError

if TYPE_CHECKING:
    from edge.export.exporter import ExportSummary


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(help="Checkpoint directory, or bundle in fp32 or fp16 (demo, …), to read."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Bundle folder to write.")],
    quant: Annotated[str, typer.Option(help="Weights: fp32, fp16, w8 or w4.")] = "fp16",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer file or folder, when the checkpoint has none.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Run the bundle against the reference network afterwards.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Convert a checkpoint directory into a bundle the runtime can run."""
    from edge.runtime.model import resolve

    try:
        from edge.export.exporter import export_checkpoint
    except ModuleNotFoundError as missing:
        raise ExportError(
            f"exporting needs the package {missing.name}",
            remedy="pip install 'mamba-edge[export]' (in a checkout: make test installs it)",
        ) from None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), "{task.percentage:>3.0f}%")
    console = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task("reading", total=1.0)

        def progress(stage: str, done: float) -> None:
            bar.update(task, description=f"{stage:<10}", completed=done)

        summary = export_checkpoint(
            resolve(checkpoint), output,
            quant=quant, tokenizer=tokenizer, verify=verify, progress=progress,
        )  # fmt: skip
    if summary.notice:
        print(f"note: {summary.notice}", file=sys.stderr)
    print(json.dumps(summary.to_dict(), indent=1) if as_json else describe(summary))


def describe(summary: ExportSummary) -> str:
    """What was made, in a few lines."""
    manifest = summary.manifest
    kinds = [layer.kind for layer in manifest.model.layers]
    layers = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    bundle = sum(entry.size for entry in manifest.files)
    lines = [
        f"{summary.path}",
        f"  family      {manifest.model.family}: {layers}",
        f"  parameters  {summary.parameters / 1e6:.1f} M",
        f"  size        {megabytes(bundle)} ({manifest.quantization.recipe}), "
        f"checkpoint {megabytes(summary.checkpoint_bytes)}",
        f"  tokenizer   {manifest.tokenizer.kind}, {manifest.tokenizer.vocab_size} tokens",
        f"  accuracy    {summary.verdict}",
    ]
    return "\n".join([*lines, f"talk to it: edge-chat {summary.path}"])
