"""The outlier trial: does quantization hold on a model with the outliers of a large one?

`python -m edge.apps.demo.outlier_trial make CHECKPOINT -o BUNDLE` writes an fp32 bundle with
outliers; `quantize BUNDLE -o FOLDER --text FILE` quantizes it in every way that is compared, those
of Quamba's Table 4 among them: plain static int8, with x clipped by a percentile, with y rotated,
and with both. Only Mamba layers differ in these four. `edge eval FOLDER/NAME TEXT` measures each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edge.apps.demo.outliers import X_PEAK, Y_PEAKS, OutlierCheckpoint
from edge.errors import EdgeError
from edge.export.exporter import export_checkpoint
from edge.export.quantize.plan import Static
from edge.export.recipes.base import Recipe, names, recipe, register
from edge.export.recipes.tables import ABSMAX, HADAMARD, PERCENTILE, mamba1, mamba2

PLAIN = "w8a8-static"
# How x and y are rounded.
ABLATION: dict[str, tuple[Static, Static]] = {
    f"{PLAIN}+percentile": (PERCENTILE, ABSMAX),
    f"{PLAIN}+hadamard": (ABSMAX, HADAMARD),
    f"{PLAIN}+both": (PERCENTILE, HADAMARD),
}
COMPARED = (
    "fp32",
    PLAIN,
    *ABLATION,
    "w8a8",
    "w8a8-o",
    "w8a8-dynamic",
    "w8a8-smoothquant",
    "w8a8-hadamard",
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def register_ablation() -> None:
    """Make the steps between plain static int8 and Quamba recipes, once."""
    plain = recipe(PLAIN)
    for name, (x, y) in ABLATION.items():
        if name in names():
            continue
        layers = {**plain.layers, "mamba1": mamba1(x=x, y=y), "mamba2": mamba2(x=x, y=y)}
        details = {**plain.details, "method": f"min-max; {name.partition('+')[2]} of Quamba"}
        register(Recipe(name, plain.bits, plain.block_size, plain.ends, layers, details))


@app.command()
def make(
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


@app.command()
def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint, or bundle in fp32 or fp16.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the bundles.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text to calibrate on. Not the text that is measured on."),
    ] = None,
    recipes: Annotated[
        str, typer.Option(help="Names out of the table, divided by commas.")
    ] = ",".join(COMPARED),
    percentile: Annotated[
        float | None, typer.Option(help="p of x, in %; by default after the model's size.")
    ] = None,
    sequences: Annotated[int | None, typer.Option(help="Calibration sequences.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of each.")] = None,
) -> None:
    """Write a bundle a recipe into FOLDER."""
    register_ablation()
    try:
        for name in recipes.split(","):
            told = recipe(name)
            clips = any(
                isinstance(how, Static) and how.clip == "percentile"
                for table in told.layers.values()
                for how in table.values()
            )
            summary = export_checkpoint(
                checkpoint,
                output / name,
                quant=name,
                calibrate=text if told.calibrated else None,
                calibrate_sequences=sequences if told.calibrated else None,
                calibrate_length=length if told.calibrated else None,
                percentile=percentile if clips else None,
            )
            size = sum(entry.size for entry in summary.manifest.files)
            print(f"{output / name}: {size / 1e6:.1f} MB", file=sys.stderr)
    except EdgeError as problem:
        print(f"error: {problem}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
