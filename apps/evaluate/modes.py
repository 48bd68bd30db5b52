"""Modes of `edge eval`. Each returns a dictionary for `--json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from edge.apps.evaluate.noise import chosen, noisy_parts
from edge.apps.evaluate.score import (
    RunReader,
    check_context,
    check_same_ids,
    compare,
    finite,
    measure,
)
from edge.apps.evaluate.tasks import run_tasks
from edge.apps.evaluate.texts import total_bytes
from edge.apps.evaluate.windows import TextSource, reading
from edge.apps.exporter import packages_of
from edge.apps.progress import load, stages
from edge.errors import InputError
from edge.runtime.model import Model

# default ids per window for the slow reference ops
SHORT_WINDOW = 512


@dataclass(frozen=True)
class EvalRequest:
    """Options of an evaluation as given on the command line; see `edge eval --help`."""

    bundle: str
    texts: Sequence[Path]
    threads: int | None = None
    window: int | None = None
    stride: int | None = None
    stream: bool = False
    max_tokens: int | None = None
    engine: str = "auto"
    provider: str | None = None

    def load(self, bundle: str | None = None) -> Model:
        """Load the request's bundle on its engine, or `bundle`, the reference, on `auto`."""
        if bundle is not None:
            return load(bundle, threads=self.threads)
        return load(self.bundle, engine=self.engine, threads=self.threads, provider=self.provider)

    @contextmanager
    def source(self, *models: Model, passes: int = 1) -> Iterator[TextSource]:
        """Provide the text for these models, with a progress bar over `passes` readings of it.

        Raises InputError when there is no text, or when a model cannot read it in the given way.
        """
        if not self.texts:
            raise InputError("is missing", field="TEXT", remedy="give a text file to measure on")
        windows = reading([m.config for m in models], self.window, self.stride, self.stream)
        for model in models:
            check_context(model.engine, windows)
        total, read = passes * total_bytes(self.texts), 0
        with stages("reading", 7) as show:

            def advance(size: int) -> None:
                nonlocal read
                read += size
                show("reading", read / total)

            yield TextSource(self.texts, windows, self.max_tokens, advance)


def identity(model: Model) -> dict[str, Any]:
    """Return the facts that identify the bundle of a result."""
    return {
        "bundle": str(model.path),
        "engine": model.engine.name,
        "provider": model.engine.provider,
        "fingerprint": model.fingerprint,
        "quantization": model.manifest.quantization.recipe,
    }


def perplexity(request: EvalRequest) -> dict[str, Any]:
    """Measure `edge eval BUNDLE TEXT…`."""
    model = request.load()
    with request.source(model) as source:
        tally = measure(RunReader(model.engine, source.how), source.runs(model))
    return identity(model) | source.describe() | tally.to_dict()


def divergence(request: EvalRequest, against: str) -> dict[str, Any]:
    """Measure `--against OTHER`."""
    model, other = request.load(), request.load(against)
    check_same_ids(model, other)
    chunk = min(model.engine.chunk, other.engine.chunk)
    with request.source(model, other) as source:
        mine, theirs = (RunReader(m.engine, source.how, chunk) for m in (model, other))
        comparison = compare(mine, theirs, source.runs(model))
    facts = identity(model) | source.describe() | comparison.this.to_dict()
    return facts | {"against": identity(other) | comparison.other.to_dict()} | comparison.to_dict()


def robustness(
    request: EvalRequest, kind: str, probability: float | None, seed: int
) -> dict[str, Any]:
    """Measure `--noise KIND`: word-level perplexity of clean chunks that follow noisy ones."""
    kinds = chosen(kind, probability, seed)
    model = request.load()
    with request.source(model, passes=1 + len(kinds)) as source:
        reader = RunReader(model.engine, source.how)
        clean, *noisy = (
            measure(reader, source.runs(model, partial(noisy_parts, noise)))
            for noise in (None, *kinds)
        )
    rows = [
        {"kind": noise.kind, "probability": noise.probability}
        | tally.to_dict()
        | {"degradation": finite(tally.word_perplexity - clean.word_perplexity)}
        for noise, tally in zip(kinds, noisy, strict=True)
    ]
    return identity(model) | source.describe() | clean.to_dict() | {"seed": seed, "noise": rows}


def tasks(
    request: EvalRequest,
    names: str,
    *,
    folder: Path | None,
    limit: int | None,
    fewshot: int | None,
    chat: bool,
) -> dict[str, Any]:
    """Run `--tasks A,B`."""
    if request.texts or request.stream or request.stride or request.max_tokens:
        raise InputError(
            "brings its own text: leave out TEXT and the options for reading it", field="--tasks"
        )
    model = request.load()
    results = run_tasks(
        model, [name.strip() for name in names.split(",") if name.strip()], folder=folder,
        limit=limit, fewshot=fewshot, chat=chat, max_length=request.window,
    )  # fmt: skip
    return identity(model) | {"limit": limit, "fewshot": fewshot, "chat": chat, "tasks": results}


def divergence_of_layers(request: EvalRequest, against: str) -> dict[str, Any]:
    """Measure `--against OTHER --layers`: signal-to-noise ratio of every layer."""
    module = _reference_module("--layers")
    model, other, shortened = _load_pair(request, against, module.LAYER_TOKENS)
    with shortened.source(model, other) as source:
        layers = module.measure_layers(model, other, source.runs(model))
    rows = [
        {
            "index": layer.index,
            "kind": layer.kind,
            "output_snr_db": finite(layer.output.decibels),
            "residual_snr_db": finite(layer.residual.decibels),
        }
        for layer in layers
    ]
    facts = identity(model) | source.describe() | {"max_tokens": shortened.max_tokens}
    return facts | {"against": identity(other), "layers": rows}


def sensitivity(request: EvalRequest, against: str, each_layer: bool) -> dict[str, Any]:
    """Measure `--against FLOATING --sensitivity`: each rounding of BUNDLE alone, worst first."""
    module = _reference_module("--sensitivity")
    this, floating, shortened = _load_pair(request, against, module.DEFAULT_TOKENS)
    sites = module.sites(this, floating, each_layer)
    with shortened.source(this, floating) as source:
        results = module.measure_sites(floating, sites, source.runs(floating))
    rows = [
        {"name": site.name, "kind": site.kind, "places": site.places}
        | {"perplexity": finite(comparison.this.perplexity)}
        | comparison.to_dict()
        for site, comparison in results
    ]
    rows.sort(key=lambda row: (-row["kl_nats_per_token"], row["name"]))
    facts = identity(this) | source.describe() | {"max_tokens": shortened.max_tokens}
    baseline = identity(floating) | results[0][1].other.to_dict()
    return facts | {"against": baseline, "sensitivity": rows}


def _load_pair(request: EvalRequest, against: str, tokens: int) -> tuple[Model, Model, EvalRequest]:
    """Load both models, and limit the request to text that the slow reference ops can read."""
    this, other = request.load(), request.load(against)
    check_same_ids(this, other)
    if request.stream:
        raise InputError("is not supported by the reference ops", field="--stream")
    contexts = [m.config.max_context or SHORT_WINDOW for m in (this, other)]
    return this, other, replace(
        request,
        window=request.window or min(SHORT_WINDOW, *contexts),
        max_tokens=request.max_tokens or tokens,
    )  # fmt: skip


def _reference_module(option: str) -> Any:
    """Import the module that needs the reference ops. Raises EdgeError without torch or onnx."""
    with packages_of("export", option):
        return import_module("edge.apps.evaluate.sensitivity")
