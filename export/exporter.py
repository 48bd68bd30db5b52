"""Export a checkpoint directory to a bundle."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

import edge
from edge.bundle import BundleWriter, Limits, Manifest, Provenance, Quantization
from edge.bundle.kernels import sizes
from edge.errors import ExportError
from edge.export import text_files
from edge.export.calibration.prepare import PreparedPlan, Progress, TextChoice, prepare
from edge.export.calibration.texts import LENGTH, SEQUENCES
from edge.export.checkpoint import Checkpoint, open_checkpoint, unknown_line
from edge.export.graph import GRAPH_FILE, BuiltGraph, build_graph
from edge.export.judging import accuracy_line, judge, perplexity_line, poor_line
from edge.export.kernels import add_kernels, add_plan, check_can_compile
from edge.export.quantize.plan import CacheType, StateType
from edge.export.recipes import Choices, Mixture, Recipe, mixture, recipe
from edge.export.recipes.mixture import EndType
from edge.export.tokenizer_files import CHAT_TEMPLATE
from edge.plugins.catalogue import OPS
from edge.tensors import parameters

# Maximum number of tokens per run. Longer chunks make products faster, but scan temporaries larger
# and slower; docs/inside/decisions.md has the measurement.
CHUNK = 128
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint was fetched from, for the manifest.

    Attributes:
        source: repository or package.
        revision: its commit or version.
        licence: licence stated there; takes precedence over the checkpoint's files.
    """

    source: str
    revision: str | None = None
    licence: str | None = None


@dataclass(frozen=True)
class ExportSummary:
    """Result of `export_checkpoint`.

    Attributes:
        path: the bundle.
        parameters: number of parameters of the model, each tensor counted once.
        checkpoint_bytes: size of the files at the top level of the checkpoint's directory.
        accuracy: one line: how far the bundle is from the network, or why it was not measured.
        verdict: one line: recipe, size, perplexity before and after.
        notice: warnings to read before using the bundle, or None.
        unplanned: reason why there is no launch plan for the CUDA engine, or None.
        unbuildable: reason why there is a launch plan but no graph for TensorRT, or None.
    """

    path: Path
    manifest: Manifest
    parameters: int
    checkpoint_bytes: int
    accuracy: str
    verdict: str
    notice: str | None = None
    unplanned: str | None = None
    unbuildable: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "parameters": self.parameters,
            "checkpoint_bytes": self.checkpoint_bytes,
            "bundle_bytes": self.manifest.nbytes,
            "kernels": {
                name: {"kernels": count, "bytes": size}
                for name, (count, size) in sizes(self.manifest).items()
            },
            "quantization": self.manifest.quantization.model_dump(mode="json"),
            "accuracy": self.manifest.accuracy,
        }


def export_checkpoint(
    checkpoint: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    quant: str = "fp32",
    layers: Mapping[str, str] | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    calibrate_sequences: int | None = None,
    calibrate_length: int | None = None,
    percentile: float | None = None,
    ssm_state: StateType | None = None,
    kv_cache: CacheType | None = None,
    embedding: EndType | None = None,
    head: EndType | None = None,
    groups: bool = False,
    verify: bool = True,
    chunk: int = CHUNK,
    tokenizer: str | os.PathLike[str] | None = None,
    strict: bool = False,
    architectures: Sequence[int] = (),
    origin: Origin | None = None,
    progress: Progress | None = None,
) -> ExportSummary:
    """Export a checkpoint directory, or a floating bundle, to a bundle at `out`.

    `out` is written completely or not at all. The same checkpoint, text and options give the same
    bundle, byte for byte.

    Args:
        quant: recipe name (`edge.export.recipes.names()`).
        layers: kind of layer → recipe to use for it instead: {"attention": "fp16"}.
        calibrate: UTF-8 text or .jsonl file for recipes that calibrate; by default the greetings
            that the demonstration models were trained on.
        calibrate_sequences, calibrate_length: sequences and tokens per sequence to calibrate on;
            128 × 512 by default.
        percentile: percentile p at which a recipe clips; by default chosen by model size.
        ssm_state: "fp32", "fp16" or "int8", for layers that run on int8 ops.
        kv_cache: "fp32" or "fp16", for attention; by default the recipe's.
        embedding, head: "int8" or "fp16", for recipes with int8 activations.
        groups: use Quamba2's grouped scales for Mamba-2's x, B and C.
        verify: compare the graph with the fp32 network and record the figures in the manifest. A
            model whose weights exceed VERIFY_LIMIT in memory is skipped, which the manifest notes.
        tokenizer: file or directory that replaces the checkpoint's tokenizer; "bytes" reads text
            as bytes.
        strict: refuse unknown fields of config.json; otherwise `notice` lists them.
        architectures: architectures to compile the CUDA engine's kernels for, such as 87 for sm_87.
            Even without any, the bundle has a launch plan if all its ops have kernels.
        origin: where the checkpoint is from; by default the name of its directory or file.
        progress: called with a stage and the share of the export that is done.

    Raises CheckpointError when the checkpoint cannot be read; ExportError when a recipe is unknown
    or does not fit the model, the calibration text is unusable, `out` is something other than a
    bundle, the tokenizer does not fit, the graph is wrong, or kernels cannot be compiled.
    """
    report = progress or (lambda stage, fraction: None)
    choices = Choices(layers or {}, percentile, ssm_state, kv_cache, embedding, head, groups)
    recipe(quant)
    check_can_compile(architectures)
    report("reading", 0.0)
    source = (
        checkpoint
        if isinstance(checkpoint, Checkpoint)
        else open_checkpoint(checkpoint, strict=strict)
    )
    mixed = mixture(source.config, quant, choices)
    tokenizer_path = None if tokenizer is None else Path(tokenizer)
    tokenizer_info, copies = text_files.tokenizer_info(source, source.config, tokenizer_path)
    text = _text_choice(calibrate, calibrate_sequences, calibrate_length)
    with BundleWriter(out) as writer:
        with prepare(source, mixed, text, tokenizer_path, writer.folder, report) as prepared:
            built = build_graph(
                source.config, source, writer.folder, prepared.plan, hessian=prepared.hessian,
                progress=lambda _, done, total: report("weights", 0.5 + 0.15 * done / total),
            )  # fmt: skip
        template = _copy_text(source, writer, copies)
        report("checking", 0.65)
        check_graph(writer.folder)
        planned = add_plan(writer, GRAPH_FILE, architectures)
        accuracy: dict[str, Any] = {"skipped": "verification was switched off"}
        if verify:
            accuracy = judge(
                source, prepared, mixed.rounds_activations, writer.folder, tokenizer_info, report
            )
        added = add_kernels(writer, planned, architectures, report, (0.9, 0.97))
        report("hashing", 0.97)
        manifest = writer.finish(
            created_by=f"edge {edge.__version__}",
            model=source.config,
            quantization=_quantization(recipe(quant), mixed, prepared, built, writer),
            state_dtypes=built.state_dtypes,
            scan_logs=built.scan_logs,
            opset=built.opsets,
            graphs={"ort": GRAPH_FILE, **added.graphs},
            kernels=added.kernels,
            limits=Limits(chunk=chunk),
            tokenizer=tokenizer_info,
            chat_template=template,
            generation=text_files.generation_defaults(source),
            accuracy=accuracy,
            provenance=_provenance(source, origin),
        )
        report("done", 1.0)
        count = parameters(source.config)
        return ExportSummary(
            path=writer.target,
            manifest=manifest,
            parameters=count,
            checkpoint_bytes=source.nbytes,
            accuracy=accuracy_line(accuracy),
            verdict=f"{size_line(manifest, count)}; {perplexity_line(accuracy)}",
            notice="\n".join(_notices(source, prepared, mixed, accuracy)) or None,
            unplanned=added.unplanned,
            unbuildable=added.unbuildable,
        )


def _notices(
    source: Checkpoint, prepared: PreparedPlan, mixed: Mixture, accuracy: dict[str, Any]
) -> Iterator[str]:
    """Yield warnings for the user."""
    if unknown := source.unknown_fields:
        yield f"{unknown_line(unknown)}; they were ignored"
    if prepared.text is not None and not prepared.text.given:
        yield (
            "calibrated on the greetings of the demonstration models, a poor substitute for text "
            "like the model's own: give some with --calibrate"
        )
    if thin := {} if prepared.hessian is None else prepared.hessian.thin():
        count, first = sum(map(len, thin.values())), min(thin)
        yield (
            f"{count} experts saw too few tokens of the calibration text for GPTQ, "
            f"such as expert {thin[first][0]} of {first}: calibrate with more text"
        )
    if poor := poor_line(mixed.name, mixed.rounds_activations, accuracy):
        yield poor


def _text_choice(
    path: str | os.PathLike[str] | None, sequences: int | None, length: int | None
) -> TextChoice | None:
    """Return the choice of text, or None when no option concerns it."""
    if path is None and sequences is None and length is None:
        return None
    return TextChoice(
        None if path is None else Path(path),
        SEQUENCES if sequences is None else sequences,
        LENGTH if length is None else length,
    )


def size_line(manifest: Manifest, count: int) -> str:
    """Describe the recipe, the size, and its share of `count` fp32 parameters."""
    size = manifest.nbytes
    if manifest.quantization.recipe == "fp32":
        return f"fp32: {size / 1e6:.1f} MB"
    share = f"{size / 1e6:.1f} MB, {size / (4 * count):.2f} of fp32"
    return f"{manifest.quantization.recipe}: {share}"


def _provenance(source: Checkpoint, origin: Origin | None) -> Provenance:
    if source.manifest is not None:  # keep the bundle's own source, and add the bundle
        return source.manifest.provenance.model_copy(update={"bundle": source.fingerprint()})
    origin = origin or Origin(source.path.resolve().name)
    return Provenance(
        source=origin.source,
        family=source.family,
        fingerprint=source.fingerprint(),
        licence=origin.licence or text_files.licence(source),
        revision=origin.revision,
    )


def _quantization(
    chosen: Recipe, mixed: Mixture, prepared: PreparedPlan, built: BuiltGraph, writer: BundleWriter
) -> Quantization:
    # Record what was stored, not what was requested: a width that no block divides stays fp32.
    details: dict[str, Any] = dict(chosen.details)
    details |= {f"{bits}-bit matrices": count for bits, count in built.matrices.items()}
    details |= mixed.choices()
    if prepared.text is not None:
        record = {"text": prepared.text.record(), "sites": dict(prepared.plan.record)}
        if thin := {} if prepared.hessian is None else prepared.hessian.thin():
            record["experts_with_few_tokens"] = thin
        data = json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n"
        writer.path(CALIBRATION_FILE).write_text(data, "utf-8", newline="\n")
        details["calibration"] = prepared.text.record() | {"sites": CALIBRATION_FILE}
    return Quantization(
        recipe=chosen.name, bits=chosen.bits, block_size=chosen.block_size, details=details
    )


def _copy_text(
    source: Checkpoint, writer: BundleWriter, copies: list[tuple[Path, str]]
) -> str | None:
    card = source.card
    for path, relative in [*copies, *([(card, card.name)] if card is not None else [])]:
        shutil.copyfile(path, writer.path(relative))
    template = text_files.chat_template(source)
    if template is None:
        return None
    writer.path(CHAT_TEMPLATE).write_text(template, "utf-8", newline="\n")
    return CHAT_TEMPLATE


def check_graph(folder: Path) -> None:
    """Run ONNX's checker on the graph and its external data. Raises ExportError if it fails."""
    # The checker looks for weights next to the graph; the bundle keeps them one folder up.
    copy = folder / "checked.onnx"
    shutil.copyfile(folder / GRAPH_FILE, copy)
    try:
        onnx.checker.check_model(copy)
    except onnx.checker.ValidationError as problem:
        raise ExportError(f"the graph is not valid ONNX: {problem}", file=GRAPH_FILE) from None
    finally:
        copy.unlink()
    functions = onnx.load(folder / GRAPH_FILE, load_external_data=False).functions
    unknown = {f.name.partition("_")[0] for f in functions} - OPS.keys()
    if unknown:
        raise ExportError(f"the graph defines ops without a statement: {sorted(unknown)}")
