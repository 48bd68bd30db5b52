"""From a checkpoint directory to a bundle."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import edge
from edge.bundle import BundleWriter, Limits, Manifest, Provenance, Quantization
from edge.bundle.manifest import TokenizerInfo
from edge.config import ModelConfig
from edge.errors import ExportError
from edge.export import text_files
from edge.export.checkpoint import Checkpoint, open_checkpoint
from edge.export.graph import GRAPH_FILE, WEIGHT_FILE, BuiltGraph, build_graph
from edge.export.graph.verify import verify_graph
from edge.export.quantize import Recipe, plan_model, recipe
from edge.ops import OPS
from edge.tensors import parameters

# The most tokens of one run. Longer chunks give larger products, which are faster, and larger
# scan temporaries, which are slower; docs/decisions.md has the measurement.
CHUNK = 128
# Weights that verification holds in memory, with ONNX Runtime's own copies of them.
VERIFY_LIMIT = 12 << 30
VERIFY_TOKENS = 192
# Text for verification: what a trained model sees is text, and random tokens exaggerate.
_TEXT = """\
The river rises in the hills north of the town and runs for forty miles before it meets the sea. In
spring, when the snow melts, the water is cold and fast, and the bridges are closed to carts.
Q: How long is the river? A: It is about forty miles long.
The old mill at the bend was built in 1842; its wheel turned until 1967, and today a small turbine
gives power to a dozen houses. "We keep it running," said the engineer, "because someone has to."
def area(w, h): return w * h  # metres
Step 1: open the valve. Step 2: wait until the pressure falls below 3.5 bar. Step 3: close it again,
and write the time into the log. Thank you! What can I do next?
"""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ExportSummary:
    """What `export_checkpoint` made.

    Attributes:
        path: the bundle.
        parameters: of the model, each tensor counted once.
        checkpoint_bytes: size of the checkpoint's directory, its top level.
        verdict: one line about accuracy, or why it was not measured.
        notice: what the user should know before using it, or None.
    """

    path: Path
    manifest: Manifest
    parameters: int
    checkpoint_bytes: int
    verdict: str
    notice: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "parameters": self.parameters,
            "checkpoint_bytes": self.checkpoint_bytes,
            "bundle_bytes": sum(entry.size for entry in self.manifest.files),
            "quantization": self.manifest.quantization.model_dump(mode="json"),
            "accuracy": self.manifest.accuracy,
        }


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quant: str = "fp32",
    verify: bool = True,
    chunk: int = CHUNK,
    tokenizer: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> ExportSummary:
    """Write the bundle of a checkpoint directory, or of a floating bundle, to `out`, whole or not
    at all.

    `progress(stage, fraction)` is called as work proceeds. With `verify`, the graph is run against
    the fp32 network and the figures go into the manifest; a model whose weights exceed VERIFY_LIMIT
    in memory is not run, and the manifest says so. `tokenizer`, a file or a directory, goes before
    what the checkpoint has; a model without one reads bytes, and `notice` says so. The same
    checkpoint and recipe give the same bundle, byte for byte.

    Raises CheckpointError when the checkpoint cannot be read; ExportError when the recipe is
    unknown, `out` is something other than a bundle, the tokenizer does not fit, or the graph is
    wrong.
    """
    report = progress or (lambda stage, fraction: None)
    chosen = recipe(quant)
    report("reading", 0.0)
    source = open_checkpoint(checkpoint)
    given = None if tokenizer is None else Path(tokenizer)
    reads, copies = text_files.tokenizer_info(source, source.config, given)
    with BundleWriter(out) as writer:
        built = build_graph(
            source.config, source, writer.folder, plan_model(source.config, chosen),
            progress=lambda stage, done, total: report("weights", 0.05 + 0.6 * done / total),
        )  # fmt: skip
        template = _copy_text(source, writer, copies)
        report("checking", 0.65)
        check_graph(writer.folder)
        accuracy = _accuracy(source, chosen, writer.folder, reads, verify, report)
        report("hashing", 0.9)
        manifest = writer.finish(
            created_by=f"edge {edge.__version__}",
            model=source.config,
            quantization=_quantization(chosen, built),
            opset=built.opsets,
            graphs={"ort": GRAPH_FILE},
            limits=Limits(chunk=chunk),
            tokenizer=reads,
            chat_template=template,
            generation=text_files.generation_defaults(source),
            accuracy=accuracy,
            provenance=_provenance(source),
        )
        report("done", 1.0)
        return ExportSummary(
            path=writer.target,
            manifest=manifest,
            parameters=parameters(source.config),
            checkpoint_bytes=sum(p.stat().st_size for p in source.path.iterdir() if p.is_file()),
            verdict=_verdict(accuracy),
            notice=text_files.without_tokenizer(reads, source.config),
        )


def _provenance(source: Checkpoint) -> Provenance:
    if source.manifest is not None:  # what the bundle was made from, and the bundle
        return source.manifest.provenance.model_copy(update={"bundle": source.fingerprint()})
    return Provenance(
        source=source.path.resolve().name,
        family=source.family,
        fingerprint=source.fingerprint(),
        licence=text_files.licence(source),
    )


def _quantization(chosen: Recipe, built: BuiltGraph) -> Quantization:
    # A width that no block divides keeps a matrix fp32: say what was stored, not what was asked.
    stored = {f"{bits}-bit matrices": count for bits, count in built.matrices.items()}
    return Quantization(
        recipe=chosen.name,
        bits=chosen.bits,
        block_size=chosen.block_size,
        details={**chosen.details, **stored},
    )


def _copy_text(
    source: Checkpoint, writer: BundleWriter, copies: list[tuple[Path, str]]
) -> str | None:
    card = source.path / text_files.MODEL_CARD
    for path, relative in [*copies, *([(card, card.name)] if card.is_file() else [])]:
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


def _accuracy(
    source: Checkpoint,
    chosen: Recipe,
    folder: Path,
    tokenizer: TokenizerInfo,
    verify: bool,
    report: Progress,
) -> dict[str, Any]:
    if not verify:
        return {"skipped": "verification was switched off"}
    size = resident_bytes(source.config, chosen, folder)
    if size > VERIFY_LIMIT:
        return {
            "skipped": f"running it takes {size >> 30} GiB, more than the {VERIFY_LIMIT >> 30} GiB "
            "that export allows itself"
        }
    report("verifying", 0.7)
    tokens, kind = sample_tokens(source.config, folder, tokenizer)
    figures = verify_graph(source.config, source, folder, tokens, chosen.bits)
    return {"on": kind, **figures}


def resident_bytes(config: ModelConfig, chosen: Recipe, folder: Path) -> int:
    """About what a session holds: floating weights widened to fp32, quantized ones packed again."""
    if chosen.bits >= 16:
        return 2 * 4 * parameters(config)
    return 2 * (folder / WEIGHT_FILE).stat().st_size


def sample_tokens(
    config: ModelConfig, folder: Path, tokenizer: TokenizerInfo
) -> tuple[NDArray[np.int64], str]:
    """Tokens [1, ≤VERIFY_TOKENS] of a fixed English text, or random ones where it has too few."""
    limit = min(VERIFY_TOKENS, config.max_context or VERIFY_TOKENS)
    ids = _encode(folder, tokenizer)[:limit]
    if len(ids) >= min(limit, 64) and max(ids) < config.vocab_size:
        return np.array([ids], np.int64), "text"
    random = np.random.default_rng(0).integers(0, tokenizer.vocab_size, (1, limit))
    return random.astype(np.int64), "random tokens"


def _encode(folder: Path, tokenizer: TokenizerInfo) -> list[int]:
    if tokenizer.file is None:
        return list(_TEXT.encode())
    path = str(folder / tokenizer.file)
    if tokenizer.kind == "tokenizer.json":
        from tokenizers import Tokenizer

        return list(Tokenizer.from_file(path).encode(_TEXT, add_special_tokens=False).ids)
    from sentencepiece import SentencePieceProcessor

    return list(SentencePieceProcessor(model_file=path).encode(_TEXT))


def _verdict(accuracy: dict[str, Any]) -> str:
    if "skipped" in accuracy:
        return f"not measured: {accuracy['skipped']}"
    return (
        f"against the fp32 network over {accuracy['tokens']} tokens: "
        f"KL {accuracy['kl_nats_per_token']:.2g} nats a token, "
        f"top-1 agrees {accuracy['top1_agreement']:.1%}, "
        f"largest logit difference {accuracy['max_logit_difference']:.2g}"
    )
