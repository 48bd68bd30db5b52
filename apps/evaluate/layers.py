"""How much noise each layer adds: signal to noise of one bundle's values beside another's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edge.apps.evaluate.parts import Ints
from edge.apps.evaluate.sensitivity import graph_of, reference
from edge.apps.evaluate.windows import Run
from edge.errors import InputError
from edge.export.graph.run import GraphRunner
from edge.plugins.reference.graph import ReferenceGraph
from edge.runtime.model import Model

DEFAULT_TOKENS = 1024


@dataclass
class Noise:
    """Signal to noise of one value, over every token and channel.

    Attributes:
        signal: Σ s². noise: Σ (s - x)².
    """

    signal: float = 0.0
    noise: float = 0.0

    @property
    def decibels(self) -> float:
        """10·log10(signal / noise); infinite without noise."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass(frozen=True)
class LayerNoise:
    """`output`: of what a layer adds. `residual`: of the stream after it was added."""

    index: int
    kind: str
    output: Noise
    residual: Noise


def measure_layers(this: Model, other: Model, runs: Iterable[Run]) -> list[LayerNoise]:
    """Every layer of `this`, with `other` as the signal, both run by the reference ops on the same
    windows. Each reads what its own layers before have made: noise adds up.

    Raises InputError for bundles of different models.
    """
    if this.config != other.config:
        raise InputError(
            f"{other.path} is another model than {this.path}", field="--layers",
            remedy="compare bundles of one model",
        )  # fmt: skip
    kinds = [layer.kind for layer in this.config.layers]
    found = [LayerNoise(i, kind, Noise(), Noise()) for i, kind in enumerate(kinds)]
    names = {f"layers.{i}.out": layer.output for i, layer in enumerate(found)}
    # the stream after a layer is what the next one's norm adds up
    names |= {f"layers.{i + 1}.residual": layer.residual for i, layer in enumerate(found[:-1])}
    names["final.residual"] = found[-1].residual
    graphs = [reference(model, graph_of(model)) for model in (this, other)]
    runner = GraphRunner(graphs[0], this.config)
    theirs = GraphRunner(graphs[1], other.config)
    for run in runs:
        if run.wanted.any():
            mine = _values(graphs[0], runner, run.ids, list(names))
            signal = _values(graphs[1], theirs, run.ids, list(names))
            for name, noise in names.items():
                s, x = (values[name].astype(np.float64) for values in (signal, mine))
                noise.signal += float(np.square(s).sum())
                noise.noise += float(np.square(s - x).sum())
    return found


def _values(
    graph: ReferenceGraph, runner: GraphRunner, ids: Ints, names: list[str]
) -> dict[str, np.ndarray]:
    feeds = runner.feeds(ids[None], runner.initial(1, len(ids)))
    return graph.watch(None, (), feeds, names)
