"""Measure the cost of each rounding alone in a floating-point model, and the noise of each layer.

After Quamba's figures 9 to 11 (arXiv 2410.13229, appendix). The reference ops run the floating
bundle's graph. One kind of value or weight at a time is rounded in it as in the quantized bundle's
graph, with the scales and weights of that bundle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor

from edge.apps.evaluate.parts import Ints
from edge.apps.evaluate.roundings import Found, Initializers, StateRounding, find, with_weights
from edge.apps.evaluate.score import Comparison, count_text
from edge.apps.evaluate.windows import TextRun
from edge.apps.measure.agreement import Logits
from edge.config import ModelConfig
from edge.errors import InputError
from edge.export.graph.model import GRAPH_FILE
from edge.export.graph.run import GraphRunner
from edge.export.training_ops import selective_scan_heads_chunked
from edge.plugins.reference.graph import ReferenceGraph
from edge.plugins.selective_scan_heads.reference import selective_scan_heads_node
from edge.runtime.model import Model

ALL, WEIGHTS, ACTIVATIONS = "everything", "all weights", "all activations"
_CHUNK = 32
DEFAULT_TOKENS, LAYER_TOKENS = 2048, 1024
Rounder = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """Values, weights and states that are rounded together.

    Attributes:
        name: human-readable name.
        kind: `weight`, `activation`, `state` or `all`.
        values: rounding by value of the floating graph.
        weights: array by initializer.
        states: rounding after every token, by state.
    """

    name: str
    kind: str
    values: Mapping[str, Rounder] = field(default_factory=dict)
    weights: Mapping[str, Logits] = field(default_factory=dict)
    states: Mapping[str, StateRounding] = field(default_factory=dict)

    @property
    def places(self) -> int:
        """Number of values, weights and states."""
        return len(self.values) + len(self.weights) + len(self.states)


NOTHING = Site("nothing", "none")


def graph_of(model: Model) -> ModelProto:
    """Read the graph that a bundle's ONNX Runtime engine runs, without its weights."""
    proto: ModelProto = ModelProto.FromString((model.path / GRAPH_FILE).read_bytes())
    return proto


def reference(model: Model, proto: ModelProto) -> ReferenceGraph:
    """Return a runnable graph over a bundle's weights, with Mamba-2's parallel scan."""
    scan = partial(selective_scan_heads_chunked, chunk=_CHUNK)
    ops = {"SelectiveScanHeads": partial(selective_scan_heads_node, scan=scan)}
    return ReferenceGraph(proto, model.path, ops=ops)


def sites(this: Model, floating: Model, each_layer: bool = False) -> list[Site]:
    """Return what `this` rounds and `floating` does not, and all of it together.

    A site is a kind of value or weight over all layers, or with `each_layer` a single one. Raises
    InputError for graphs of different models, and when nothing is rounded.
    """
    if this.config != floating.config:
        raise InputError(
            f"{floating.path} is a different model from {this.path}", field="--against",
            remedy="give the floating-point bundle of the same model",
        )  # fmt: skip
    constants = Initializers(graph_of(floating), floating.path)
    for name in constants:
        if name.endswith(".packed") or constants[name].dtype == np.int8:
            raise InputError(
                f"has quantized weights: {name}", file=floating.path, field="--against",
                remedy="give an fp32 or fp16 bundle",
            )  # fmt: skip
    roundings = find(graph_of(this), this.path, constants)
    single = _group_sites(this.config, roundings, each_layer)
    if not single:
        raise InputError(
            f"rounds nothing that {floating.path} does not", file=this.path,
            remedy="give the quantized bundle first and the floating one with --against",
        )  # fmt: skip
    combined = [Site(ALL, "all", roundings.values, roundings.weights)]
    if roundings.weights and roundings.values:
        combined += [Site(WEIGHTS, "all", weights=roundings.weights)]
        combined += [Site(ACTIVATIONS, "all", values=roundings.values)]
    return single + combined


def _group_sites(config: ModelConfig, roundings: Found, each_layer: bool) -> list[Site]:
    def groups(names: Iterable[str], weight: bool) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for name in names:
            out.setdefault(name if each_layer else site_name(config, name, weight), []).append(name)
        return out

    weights = groups(roundings.weights, True).items()
    values = groups(roundings.values, False).items()
    states = groups(roundings.states, False).items()
    return [
        *(Site(n, "weight", weights={k: roundings.weights[k] for k in ks}) for n, ks in weights),
        *(Site(n, "activation", values={k: roundings.values[k] for k in ks}) for n, ks in values),
        *(Site(n, "state", states={k: roundings.states[k] for k in ks}) for n, ks in states),
    ]  # fmt: skip


def measure_sites(
    floating: Model, chosen: Iterable[Site], runs: Iterable[TextRun]
) -> list[tuple[Site, Comparison]]:
    """Compare the floating model with each site rounded alone, on the same windows."""
    proto = graph_of(floating)
    baseline = reference(floating, proto)
    runner = GraphRunner(baseline, floating.config)
    listed = list(chosen)
    weight_sets = {id(site.weights): site.weights for site in listed if site.weights}
    # sites that share weights share a graph, because the weights are as large as a model
    graphs_by_weights = {
        key: reference(floating, with_weights(proto, weights))
        for key, weights in weight_sets.items()
    }
    graphs = [(site, graphs_by_weights.get(id(site.weights), baseline)) for site in listed]
    comparisons = [Comparison() for _ in graphs]
    for run in runs:
        wanted = np.flatnonzero(run.wanted)
        if not len(wanted):
            continue
        ids = run.ids[wanted]
        truth = logits_at(baseline, runner, run.ids, NOTHING)[wanted - 1]
        for (site, graph), comparison in zip(graphs, comparisons, strict=True):
            count_text(comparison.this, run)
            count_text(comparison.other, run)
            comparison.add(ids, logits_at(graph, runner, run.ids, site)[wanted - 1], truth)
    return [(site, comparison) for (site, _), comparison in zip(graphs, comparisons, strict=True)]


def logits_at(graph: ReferenceGraph, runner: GraphRunner, ids: Ints, site: Site) -> Logits:
    """Return logits [T - 1, V] that predict ids[1:] from an empty state, with a site rounded."""

    def hook(name: str, x: Tensor) -> Tensor | None:
        rounding = site.values.get(name) or site.states.get(name)
        return None if rounding is None else rounding(x)

    pieces = []
    state = runner.initial(1, len(ids))
    # one run, or one per token where the state between tokens is rounded
    count = len(ids) - 1
    for start, stop in [(i, i + 1) for i in range(count)] if site.states else [(0, count)]:
        feeds = runner.feeds(ids[None, start:stop], state)
        names = [port.name for port in graph.get_outputs()]
        out = graph.watch(hook, (), feeds, names)
        pieces.append(out["logits"][:, 0])
        if site.states:
            state = type(state)(_next_state(out), stop)
    return np.concatenate(pieces)


def _next_state(out: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    states = {n[:-1]: array[0] for n, array in out.items() if n.endswith("_states")}
    caches = {n.removesuffix("_out"): a for n, a in out.items() if n.endswith("_cache_out")}
    return states | caches


# -- names ----------------------------------------------------------------------------------------

# value in the floating graph → description; Quamba, arXiv 2410.13229, figures 9 to 11
_VALUES = {
    "normed": "input of {in_proj}",
    "xz": "x and z",
    "z": "gate z",
    "xBC": "x, B, C before the convolution",
    "conv": "x of the scan",
    "dbc": "Δ of low rank, B, C",
    "low_rank_dt": "Δ of low rank",
    "dt": "Δ",
    "B": "B",
    "C": "C",
    "scan": "y",
    "joined": "y",
    "activated": "input of down_proj",
    "attended_time": "input of o_proj",
    "ssm_states": "state h",
}


def site_name(config: ModelConfig, name: str, weight: bool) -> str:
    """Describe a value: `layers.3.x` → "mamba2: x of the scan", the same in layers of a kind."""
    if not name.startswith("layers."):
        if weight:
            return "embedding and head weights" if config.tie_embeddings else f"{name}s"
        return "input of the head"
    _, index, part = name.split(".", 2)
    kind = config.layers[int(index)].kind
    if weight:
        label = {"dt_proj.bias": "dt_bias", "dt_bias": "dt_bias"}.get(part, part.replace(".", " "))
        return f"{kind}: {label}"
    if part == "x":
        label = "x before the convolution" if kind == "mamba1" else "x of the scan"
    elif part == "gated":
        label = "input of down_proj" if kind == "mlp" else "y"
    else:
        label = _VALUES.get(part, part).format(in_proj=config.layers[int(index)].first_matrix)
    return f"{kind}: {label}"


# -- layers ---------------------------------------------------------------------------------------


@dataclass
class SignalToNoise:
    """Signal-to-noise ratio of one value, over every token and channel.

    Attributes:
        signal: Σ s².
        noise: Σ (s - x)².
    """

    signal: float = 0.0
    noise: float = 0.0

    @property
    def decibels(self) -> float:
        """10·log10(signal / noise), infinite without noise."""
        if not self.noise:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass(frozen=True)
class LayerNoise:
    """Noise of a layer. `output`: of its output. `residual`: of the residual stream after it."""

    index: int
    kind: str
    output: SignalToNoise
    residual: SignalToNoise


def measure_layers(this: Model, other: Model, runs: Iterable[TextRun]) -> list[LayerNoise]:
    """Measure every layer of `this` with `other` as the signal.

    The reference ops run both on the same windows. Each layer reads the output of its own model's
    earlier layers, so noise accumulates. Raises InputError for bundles of different models.
    """
    if this.config != other.config:
        raise InputError(
            f"{other.path} is a different model from {this.path}", field="--layers",
            remedy="compare bundles of one model",
        )  # fmt: skip
    kinds = [layer.kind for layer in this.config.layers]
    layers = [LayerNoise(i, kind, SignalToNoise(), SignalToNoise()) for i, kind in enumerate(kinds)]
    names = {f"layers.{i}.out": layer.output for i, layer in enumerate(layers)}
    # the norm of the next layer computes the residual stream after a layer
    names |= {f"layers.{i + 1}.residual": layer.residual for i, layer in enumerate(layers[:-1])}
    names["final.residual"] = layers[-1].residual
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
    return layers


def _values(
    graph: ReferenceGraph, runner: GraphRunner, ids: Ints, names: list[str]
) -> dict[str, np.ndarray]:
    feeds = runner.feeds(ids[None], runner.initial(1, len(ids)))
    return graph.watch(None, (), feeds, names)
