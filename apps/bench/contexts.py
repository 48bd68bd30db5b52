"""`python -m edge.apps.bench.contexts MODEL…`: the state of models against the tokens of context
(Mamba Drafters, arXiv 2506.01206, figure 1, as far as it is memory).

A model is what `edge info` takes: a bundle, or a config.json, a checkpoint or a GGUF file, whose
caches are then fp16. The state is what one sequence keeps: recurrent states and KV caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from edge.apps.exits import leave
from edge.apps.info import unexported
from edge.apps.measure.table import FigureTable, show
from edge.apps.options import AsJson, numbers
from edge.apps.programs import CommandGroup
from edge.apps.units import megabytes
from edge.bundle import open_bundle
from edge.config import ModelConfig
from edge.errors import InputError
from edge.runtime.engine import DEFAULT_WINDOW
from edge.runtime.layout import StateLayout
from edge.runtime.model import resolve
from edge.tensors import parameters

app = CommandGroup()


@app.command()
def contexts(
    models: Annotated[list[str], typer.Argument(help="Bundles, configs or checkpoints.")],
    tokens: Annotated[str, typer.Option(help="Tokens of context.")] = "512,2048,8192,32768",
    as_json: AsJson = False,
) -> None:
    """Show the bytes of one sequence's state for several lengths of context."""
    lengths = numbers(tokens, int, "--tokens", "512,2048")
    if min(lengths) < 1:
        raise InputError(f"{min(lengths)} is no length of a context", field="--tokens")
    rows = [row(name, lengths) for name in models]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    head = ("model", "layers", "parameters", *(f"{length:,}" for length in lengths))
    show([FigureTable(head, [_cells(each) for each in rows])])


def row(name: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return a model's facts: its layers, parameters, and bytes of state by tokens of context."""
    config, dtypes, chunk = _model(name)
    sizes = {}
    for length in lengths:
        state = StateLayout.of(config, capacity=length, dtypes=dtypes)
        state = state.sliding(window=DEFAULT_WINDOW, chunk=chunk)
        sizes[length] = state.slot_bytes + state.cache_bytes
    return {
        "model": name, "layers": config.kinds, "parameters": parameters(config),
        "max_context": config.max_context, "state_bytes": sizes,
    }  # fmt: skip


def _model(name: str) -> tuple[ModelConfig, Mapping[str, str], int]:
    """Return a model's config, the dtypes of its states, and the tokens of its longest run."""
    if unexported.is_meant(name):
        layout, _ = unexported.read(name)
        from edge.export.exporter import CHUNK  # reading has said what is missing without torch

        return layout.config, unexported.state_dtypes(layout, unexported.RECIPES[0]), CHUNK
    with open_bundle(resolve(name)) as bundle:
        manifest = bundle.manifest
        return manifest.model, manifest.state_dtypes, manifest.limits.chunk


def _cells(facts: Mapping[str, Any]) -> tuple[str, ...]:
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    sizes = (megabytes(size) for size in facts["state_bytes"].values())
    return (facts["model"], layers, f"{facts['parameters'] / 1e6:.1f} M", *sizes)


if __name__ == "__main__":
    leave(app)
