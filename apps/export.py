"""`edge export CHECKPOINT -o BUNDLE`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge.apps import exporter, options, progress
from edge.apps.programs import grouped, typed
from edge.apps.terminal import say
from edge.apps.units import kernel_line, megabytes, tensorrt_line
from edge.bundle.kernels import DEVICE_GRAPH_FILE, sizes
from edge.errors import ExportError, InputError

if TYPE_CHECKING:
    from edge.export.exporter import ExportSummary


class StateType(Enum):
    fp32 = "fp32"
    fp16 = "fp16"
    int8 = "int8"


class CacheType(Enum):
    fp32 = "fp32"
    fp16 = "fp16"


class EndType(Enum):
    int8 = "int8"
    fp16 = "fp16"


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """A group of options: how a checkpoint's tensors are quantized and calibrated."""

    quant: Annotated[
        str | None,
        typer.Option(
            help="Weights only: fp32, fp16, w8, w4, w4a16. Activations too: w8a8 (Quamba), "
            "w8a8-o, w4a8; for comparison: w8a8-static, -dynamic, -smoothquant, -hadamard, "
            "-llm-int8. [default: fp16]"
        ),
    ] = None
    layers: Annotated[
        str | None,
        typer.Option(help="Recipes for certain kinds of layers: attention=fp16,mlp=w4a16."),
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Calibration text: UTF-8, or .jsonl. [default: the demo's greetings]"),
    ] = None
    calibrate_sequences: Annotated[
        int | None, typer.Option(min=1, help="Number of calibration sequences. [default: 128]")
    ] = None
    calibrate_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each sequence. [default: 512]")
    ] = None
    percentile: Annotated[
        float | None,
        typer.Option(help="Percentile at which the scan's inputs are clipped. [default: by size]"),
    ] = None
    ssm_state: Annotated[
        StateType | None, typer.Option(help="Type of the Mamba layers' state. [default: fp32]")
    ] = None
    kv_cache: Annotated[
        CacheType | None,
        typer.Option(help="Type of the KV cache. [default: the recipe's]"),
    ] = None
    embedding: Annotated[
        EndType | None, typer.Option(help="Type of the embedding. [default: the recipe's]")
    ] = None
    head: Annotated[
        EndType | None, typer.Option(help="Type of the head. [default: the recipe's]")
    ] = None
    groups: Annotated[
        bool, typer.Option("--groups", help="Use one scale per group of Mamba-2's x, B and C.")
    ] = False
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer file or folder, or bytes, if the checkpoint has none."),
    ] = None

    def read(self) -> dict[str, Any]:
        """Return the options under the names of `export_checkpoint`.

        Raises ExportError when `--layers` is malformed.
        """
        values = {n: v.value if isinstance(v, Enum) else v for n, v in vars(self).items()}
        return values | {"quant": self.quant or "fp16", "layers": by_kind(self.layers or "")}


@grouped
def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory, .gguf file, or bundle in fp32 or fp16 (demo-fp16, …). "
            "With --target and no --quant: any bundle, which keeps its weights."
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Bundle folder to write.")],
    weights: WeightOptions,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="GPUs to compile kernels for: sm_87,sm_89 or names of boards (orin-nano, …). "
            "The CPU is always included. Needs Triton."
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse unknown fields in config.json."),
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Compare the bundle with the reference network afterwards.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Convert a checkpoint into a bundle that the runtime can run."""
    from edge.runtime.model import resolve

    architectures = _architectures(target or [])
    source = resolve(checkpoint)
    exporter.needs("exporting")
    from edge.export.checkpoint.bundle import is_bundle
    from edge.export.exporter import export_checkpoint
    from edge.export.retarget import add_targets

    with exporter.options_checked(), progress.stages("reading", 10) as show:
        if target and weights == WeightOptions() and is_bundle(source):
            summary = add_targets(source, output, architectures, progress=show)
        else:
            summary = export_checkpoint(
                source, output, **weights.read(), strict=strict, verify=verify,
                architectures=architectures, progress=show,
            )  # fmt: skip
    for line in (summary.notice or "").splitlines():
        say(f"note: {line}", file=sys.stderr)
    say(json.dumps(summary.to_dict(), indent=1) if as_json else describe(summary))


def _architectures(targets: list[str]) -> tuple[int, ...]:
    """Return the architectures that --target names; an unknown name is a usage error."""
    from edge.export.targets import architectures

    try:
        return architectures(targets)
    except InputError as problem:
        raise InputError(problem.message, field="--target", remedy=problem.remedy) from None


def by_kind(text: str) -> dict[str, str]:
    """Parse `attention=fp16,mlp=w8` into kind of layer → recipe. Raises ExportError."""
    recipes: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, equals, name = part.partition("=")
        if not equals or not name or kind in recipes:
            raise ExportError(
                f"{part!r:.80} does not name a kind of layer and its recipe",
                field="layers",
                remedy="write it as --layers attention=fp16,mlp=w8",
            )
        recipes[kind] = name
    return recipes


def describe(summary: ExportSummary) -> str:
    """Describe the exported bundle in a few lines."""
    manifest = summary.manifest
    layers = ", ".join(f"{count} {kind}" for kind, count in manifest.model.kinds.items())
    bundle = manifest.nbytes
    graph = manifest.entry(DEVICE_GRAPH_FILE)
    lines = [
        f"{summary.path}",
        f"  family      {manifest.model.family}: {layers}",
        f"  parameters  {summary.parameters / 1e6:.1f} M",
        f"  size        {megabytes(bundle)} ({manifest.quantization.recipe}), "
        f"checkpoint {megabytes(summary.checkpoint_bytes)}",
        f"  tokenizer   {manifest.tokenizer.kind}, {manifest.tokenizer.vocab_size} tokens",
        f"  accuracy    {summary.accuracy}",
        f"  kernels     {kernel_line(sizes(manifest), summary.unplanned)}",
        f"  tensorrt    {tensorrt_line(graph.size if graph else None, summary.unbuildable)}",
        f"try it: {typed('edge-chat')} {summary.path}",
        summary.verdict,
    ]
    return "\n".join(lines)
