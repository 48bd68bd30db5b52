"""Make the plan of one model from recipes and calibration statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge.config import Mixer, ModelConfig
from edge.errors import ExportError, Faults
from edge.export.mixers import mixer_of
from edge.export.quantize.layer_plan import LayerPlanner, activation, storage
from edge.export.quantize.observers import Calibration
from edge.export.quantize.plan import (
    F16,
    F32,
    INT8_ROWS,
    Activation,
    CacheType,
    Dynamic,
    LayerPlan,
    ModelPlan,
    Product,
    Rounding,
    StateType,
    Static,
    Storage,
    Table,
    fitting,
)
from edge.export.quantize.sites import Sites
from edge.export.recipes.base import KINDS, Recipe, recipe
from edge.tensors import parameters

Array = NDArray[np.float32]
EndType = Literal["int8", "fp16"]
_ENDS: dict[EndType, Storage] = {"int8": INT8_ROWS, "fp16": F16}
# p by model size, the best in Quamba's Table 5 (LAMBADA); larger models use _LARGE_PERCENTILE.
_PERCENTILES = ((370e6, 99.999), (1.4e9, 99.99))
_LARGE_PERCENTILE = 99.9


@dataclass(frozen=True)
class Choices:
    """A user's changes to a recipe; None leaves an entry as it is.

    Attributes:
        layers: kind of layer → recipe whose table it uses.
        percentile: p of sites that are clipped by a percentile.
        ssm_state: type of every Mamba layer's ssm_state.
        kv_cache: type of attention's keys and values.
        embedding, head: how the two ends are stored.
        groups: whether Mamba-2's x, B and C use Quamba2's groups.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    percentile: float | None = None
    ssm_state: StateType | None = None
    kv_cache: CacheType | None = None
    embedding: EndType | None = None
    head: EndType | None = None
    groups: bool = False


@dataclass(frozen=True)
class Observations:
    """Values of the fp32 graph that calibration must observe, as they are or rotated."""

    values: tuple[str, ...]
    rotated: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.values or self.rotated)


def default_percentile(config: ModelConfig) -> float:
    """Return the default percentile p for a model of this size."""
    size = parameters(config) / 1.05  # "370M" models have slightly more parameters
    return next((p for largest, p in _PERCENTILES if size <= largest), _LARGE_PERCENTILE)


@dataclass(frozen=True)
class Mixture:
    """Recipes chosen for a model: one for its ends, one for each kind of layer.

    `tables` are the recipes' tables, changed by the user's choices.
    """

    config: ModelConfig
    name: str
    chosen: Choices
    ends: Table
    tables: Mapping[str, Table]
    percentile: float
    state: StateType
    cache: CacheType

    def observations(self) -> Observations:
        """Return what calibration must observe; empty when no scale needs calibration."""
        names: dict[bool, list[str]] = {False: [], True: []}
        for index, layer in enumerate(self.config.layers):
            for name, how in self.tables[layer.kind].items():
                if isinstance(how, Static):
                    value = _graph_value(layer, name, self.config.d_model)
                    names[how.rotate].append(f"layers.{index}.{value}")
            if self.state == "int8" and layer.recurrent:
                names[False].append(f"layers.{index}.ssm_states")
        final = activation(self.ends, "final")
        if isinstance(final, Static):
            names[final.rotate].append("final")
        return Observations(tuple(names[False]), tuple(names[True]))

    def choices(self) -> dict[str, Any]:
        """Return, for the manifest, what the user changed and what the model's size decided."""
        record: dict[str, Any] = {}
        entries = [how for table in self.tables.values() for how in table.values()]
        if any(isinstance(how, Static) and how.clip == "percentile" for how in entries):
            record["percentile"] = self.percentile
        if self.state != "fp32":
            record["ssm_state"] = self.state
        if self.cache != "fp32" and self.config.has_attention:
            record["kv_cache"] = self.cache
        if self.chosen.layers:
            record["layers"] = dict(sorted(self.chosen.layers.items()))
        if self.chosen.groups:
            record["groups"] = True
        return record

    @property
    def four_bits(self) -> bool:
        """Whether matrices are stored in 4 bits, which GPTQ can round."""
        used = (self.tables[layer.kind] for layer in self.config.layers)
        return any(
            isinstance(how, Storage) and how.bits == 4 for table in used for how in table.values()
        )

    @property
    def rounds_activations(self) -> bool:
        tables = (self.ends, *(self.tables[layer.kind] for layer in self.config.layers))
        return any(isinstance(how, Activation) for table in tables for how in table.values())


def _graph_value(layer: Mixer, name: str, d_model: int) -> str:
    """Return the graph's name for a value that a table lists as `name`."""
    matrices = mixer_of(layer).matrices(d_model).values()
    return next((matrix.reads for matrix in matrices if matrix.reads_listed == name), name)


def mixture(config: ModelConfig, name: str, choices: Choices | None = None) -> Mixture:
    """Return the mixture that a recipe's name and the user's choices select for a model.

    Raises ExportError for an unknown recipe. Also raises it, listing every fault, for kinds of
    layer that the model lacks and choices that have no effect on the model or the recipe.
    """
    choices, faults = choices or Choices(), Faults()
    base = recipe(name)
    present: list[str] = list(dict.fromkeys(layer.kind for layer in config.layers))
    tables: dict[str, Table] = {kind: base.layers.get(kind, {}) for kind in present}
    for kind, recipe_name in choices.layers.items():
        if kind in present:
            tables[kind] = recipe(recipe_name, "layers").layers.get(kind, {})
        else:
            why = "the model has none" if kind in KINDS else "unknown kind"
            message = f"no layer is of kind {kind!r}: {why}"
            faults.add("layers", message, f"choose from: {', '.join(present)}")
    full_name = ",".join(
        [name, *(f"{k}={choices.layers[k]}" for k in KINDS if k in choices.layers)]
    )
    if choices.groups:
        tables = _with_groups(tables, faults)
    ends = _choose_ends(config, base, choices, faults)
    _refuse_ineffective(config, full_name, tables, choices, faults)
    if choices.ssm_state not in (None, "fp32"):
        _refuse_states(config, tables, choices.ssm_state, faults)
    faults.refuse(ExportError)
    return Mixture(
        config,
        full_name,
        choices,
        ends,
        tables,
        choices.percentile or default_percentile(config),
        choices.ssm_state or "fp32",
        choices.kv_cache or base.kv_cache,
    )


def _refuse_states(
    config: ModelConfig, tables: Mapping[str, Table], state: StateType | None, faults: Faults
) -> None:
    """Add a fault for each reason why layers cannot keep their states in a type."""
    reasons: dict[str, str] = {}
    for index, layer in enumerate(config.layers):
        mixer = mixer_of(layer)
        reason = mixer.hindrance(tables[layer.kind], mixer.matrices(config.d_model))
        if reason:
            reasons.setdefault(reason, f"layers.{index} cannot keep its state in {state}: {reason}")
    for message in reasons.values():
        remedy = "--ssm-state fp32, or another recipe for this kind of layer with --layers"
        faults.add("ssm_state", message, remedy)


def _choose_ends(config: ModelConfig, base: Recipe, choices: Choices, faults: Faults) -> Table:
    """Return the recipe's ends with the user's choices; tied ends are one matrix, so one choice."""
    embedding, head = choices.embedding, choices.head
    if config.tie_embeddings and embedding != head:
        if embedding and head:
            message = f"is tied to the embedding, and cannot be {head} while that is {embedding}"
            faults.add("head", message, "give both the same type")
        embedding = head = embedding or head
    ends = dict(base.ends)
    for end, chosen in (("embedding", embedding), ("head", head)):
        if chosen is not None and "final" not in ends:
            message = f"recipe {base.name} has no int8 activations, so {chosen} cannot be chosen"
            faults.add(end, message, "choose a recipe that rounds activations, such as w8a8")
        elif chosen is not None:
            ends[end] = _ENDS[chosen]
    return ends


def _with_groups(tables: Mapping[str, Table], faults: Faults) -> dict[str, Table]:
    table = dict(tables.get("mamba2", {}))
    if not all(isinstance(table.get(name), Static) for name in "xBC"):
        message = "groups need static scales for Mamba-2's x, B and C; the recipe has none"
        faults.add("groups", message, "leave --groups out")
    return {**tables, "mamba2": table | dict.fromkeys("xBC", Static(groups=True))}


def _refuse_ineffective(
    config: ModelConfig, name: str, tables: Mapping[str, Table], choices: Choices, faults: Faults
) -> None:
    """Add a fault for each choice that has no effect."""
    entries = [how for table in tables.values() for how in table.values()]
    clips = {how.clip for how in entries if isinstance(how, Static)}
    p = choices.percentile
    if p is not None and not 0 < p <= 100:
        faults.add("percentile", f"{p} is not a percentile", "give one above 0, up to 100")
    elif p is not None and "percentile" not in clips:
        message = f"recipe {name} clips nothing by a percentile"
        faults.add("percentile", message, "leave --percentile out, or choose w8a8")
    if choices.ssm_state is not None and not any(layer.recurrent for layer in config.layers):
        faults.add("ssm_state", "the model has no Mamba layer", "leave --ssm-state out")
    if choices.kv_cache is not None and not config.has_attention:
        faults.add("kv_cache", "the model has no attention", "leave --kv-cache out")


def plan_model(
    config: ModelConfig,
    chosen: Recipe | Mixture,
    *,
    calibration: Calibration | None = None,
    fetch: Callable[[str], Array] | None = None,
) -> ModelPlan:
    """Make the plan of one model.

    `fetch` returns a canonical tensor as fp32, for recipes that read weights (SmoothQuant). Raises
    ExportError when a recipe needs a calibration and gets none, when a scale is zero, and when a
    state cannot have the requested type.
    """
    mixed = mixture(config, chosen.name) if isinstance(chosen, Recipe) else chosen
    sites = Sites(calibration, mixed.percentile)
    layers = tuple(
        _plan_layer(config, index, mixed, sites, fetch or _no_weights)
        for index in range(len(config.layers))
    )
    embedding = fitting(storage(mixed.ends, "embedding", F32), config.d_model)
    head = _plan_head(config, mixed, sites)
    if config.tie_embeddings:
        head = replace(head, weight=embedding)
    return ModelPlan(mixed.name, embedding, head, layers, sites.record)


def _plan_layer(
    config: ModelConfig, index: int, mixed: Mixture, sites: Sites, fetch: Callable[[str], Array]
) -> LayerPlan:
    prefix, layer = f"layers.{index}", config.layers[index]
    mixer = mixer_of(layer)
    planner = LayerPlanner(
        prefix,
        mixer.matrices(config.d_model),
        mixed.tables[layer.kind],
        sites,
        lambda name: mixer.weight(name, lambda own: fetch(f"{prefix}.{own}")),
        mixed.state,
        mixed.cache,
    )
    return mixer.plan(planner)


def _plan_head(config: ModelConfig, mixed: Mixture, sites: Sites) -> Product:
    stored = fitting(storage(mixed.ends, "head", F32), config.d_model)
    how = activation(mixed.ends, "final")
    if how is None or not stored.int8:
        return Product(stored)
    if isinstance(how, Dynamic):
        return Product(stored, Rounding(None))
    return Product(stored, sites.rounding(sites.seen("final", how), how)[0])


def _no_weights(name: str) -> Array:
    raise TypeError(f"the recipe reads {name}, but no weights were given")
