"""`python -m edge.export.outliers CHECKPOINT -o BUNDLE`: an fp32 bundle with outliers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edge.errors import EdgeError
from edge.export.exporter import export_checkpoint
from edge.export.outliers.checkpoint import OutlierCheckpoint
from edge.export.outliers.outliers import X_PEAK, Y_PEAKS


def write(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or bundle in fp32 or fp16.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Bundle folder to write.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to look at its activations on: UTF-8, or .jsonl. Not the text "
                     "that is measured on."),
    ] = None,
    y_peak: Annotated[
        float, typer.Option(min=1, help=f"Largest y; the trial takes {Y_PEAKS}.")
    ] = Y_PEAKS[2],
) -> None:  # fmt: skip
    """The model with the same logits whose activations have the outliers of a large one.

    Quantize it with `edge export BUNDLE --quant NAME`.
    """
    try:
        made = OutlierCheckpoint(checkpoint, text, y_peak)
        summary = export_checkpoint(made, output, quant="fp32")
    except EdgeError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{output}: x up to {X_PEAK:g}, y up to {y_peak:g}; {summary.accuracy}", file=sys.stderr)


if __name__ == "__main__":
    typer.run(write)
