"""From a checkpoint directory to a bundle."""

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
from edge.plugins.catalogue import OPS
from edge.tensors import parameters

# The most tokens of one run. Longer chunks give larger products, which are faster, and larger
# scan temporaries, which are slower; docs/inside/decisions.md has the measurement.
CHUNK = 128
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint was fetched from, for the manifest.

    Attributes:
        source: the repository or package.
        revision: its commit or version.
        licence: as stated there; goes before what the files say.
    """

    source: str
    revision: str | None = None
    licence: str | None = None


@dataclass(frozen=True)
class ExportSummary:
    """What `export_checkpoint` made.

    Attributes:
        path: the bundle.
        parameters: of the model, each tensor counted once.
        checkpoint_bytes: size of the checkpoint's directory, its top level.
        accuracy: one line about how far it is from the network, or why that was not measured.
        verdict: one line: recipe, size, perplexity before and after.
        notice: what the user should know before using it, or None.
        unplanned: why it has no launch plan for the CUDA engine, or None.
        unbuildable: why it has one, but no graph for TensorRT, or None.
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
    """Write the bundle of a checkpoint directory, or of a floating bundle, to `out`, whole or not
    at all.

    Args:
        quant: a recipe's name (`edge.export.recipes.names()`).
        layers: kind of layer → another recipe for it: {"attention": "fp16"}.
        calibrate: UTF-8 text, or a .jsonl file, for recipes that find scales on text; without it
            they use the greetings the demonstration models were trained on.
        calibrate_sequences, calibrate_length: how much of it, in tokens; 128 × 512.
        percentile: p of the values that a recipe clips; by default after the model's size.
        ssm_state: "fp32", "fp16" or "int8", for layers that run on int8 ops.
        kv_cache: "fp32" or "fp16", for attention; by default the recipe's.
        embedding, head: "int8" or "fp16", for recipes with int8 activations.
        groups: scales for groups of Mamba-2's x, B and C, after Quamba2.
        verify: run the graph against the fp32 network, and put the figures into the manifest; a
            model whose weights exceed VERIFY_LIMIT in memory is not run, and the manifest says so.
        tokenizer: a file or directory that goes before what the checkpoint has; "bytes" reads
            text as bytes.
        strict: refuse fields of config.json that edge has not heard of; otherwise `notice` lists
            them.
        architectures: to compile the kernels of the CUDA engine for, as 87 for sm_87. Without any
            the bundle still has the plan to compile from, if there are kernels for its ops.
        origin: where the checkpoint is from; without it, the name of its directory or file.
        progress: called with a stage and the share of the export that is done.

    The same checkpoint, text and choices give the same bundle, byte for byte.

    Raises CheckpointError when the checkpoint cannot be read; ExportError when a recipe is unknown
    or does not fit the model, the calibration text is of no use, `out` is something other than a
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
    given = None if tokenizer is None else Path(tokenizer)
    reads, copies = text_files.tokenizer_info(source, source.config, given)
    text = _text_choice(calibrate, calibrate_sequences, calibrate_length)
    with BundleWriter(out) as writer:
        with prepare(source, mixed, text, given, writer.folder, report) as prepared:
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
                source, prepared, mixed.rounds_activations, writer.folder, reads, report
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
            tokenizer=reads,
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
    """What the user should know."""
    if unknown := source.unknown_fields:
        yield f"{unknown_line(unknown)}; they were left out of account"
    if thin := {} if prepared.hessian is None else prepared.hessian.thin():
        count, least = sum(map(len, thin.values())), min(thin)
        yield (
            f"{count} experts read too few tokens of the calibration text to be rounded by them, "
            f"such as {thin[least][0]} of {least}: calibrate with more text"
        )
    if poor := poor_line(mixed.name, mixed.rounds_activations, accuracy):
        yield poor


def _text_choice(
    path: str | os.PathLike[str] | None, sequences: int | None, length: int | None
) -> TextChoice | None:
    """None when nothing about the text was said."""
    if path is None and sequences is None and length is None:
        return None
    return TextChoice(
        None if path is None else Path(path),
        SEQUENCES if sequences is None else sequences,
        LENGTH if length is None else length,
    )


def size_line(manifest: Manifest, count: int) -> str:
    """Recipe, size, and share of `count` fp32 parameters."""
    size = manifest.nbytes
    if manifest.quantization.recipe == "fp32":
        return f"fp32: {size / 1e6:.1f} MB"
    share = f"{size / 1e6:.1f} MB, {size / (4 * count):.2f} of fp32"
    return f"{manifest.quantization.recipe}: {share}"


def _provenance(source: Checkpoint, origin: Origin | None) -> Provenance:
    if source.manifest is not None:  # what the bundle was made from, and the bundle
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
    # A width that no block divides keeps a matrix fp32: say what was stored, not what was asked.
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
    writer.path(text_files.CHAT_TEMPLATE).write_text(template, "utf-8", newline="\n")
    return text_files.CHAT_TEMPLATE


def check_graph(folder: Path) -> None:
    """ONNX's own checker over the graph and its external data. Raises ExportError."""
    # The checker looks for weights beside the graph; the bundle keeps them one folder up.
    beside = folder / "checked.onnx"
    shutil.copyfile(folder / GRAPH_FILE, beside)
    try:
        onnx.checker.check_model(beside)
    except onnx.checker.ValidationError as problem:
        raise ExportError(f"the graph is not valid ONNX: {problem}", file=GRAPH_FILE) from None
    finally:
        beside.unlink()
    functions = onnx.load(folder / GRAPH_FILE, load_external_data=False).functions
    unknown = {f.name.partition("_")[0] for f in functions} - OPS.keys()
    if unknown:
        raise ExportError(f"the graph defines ops that are not stated: {sorted(unknown)}")
