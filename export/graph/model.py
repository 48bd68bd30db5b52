"""Build the whole graph, from embedding to head, for any `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge.config import ModelConfig, RopeConfig
from edge.export.mixers import mixer_of
from edge.export.mixers.base import MixerExport
from edge.export.nodes.builder import GraphBuilder, HessianOf, TensorSource, WeightWriter
from edge.export.nodes.layer import LayerGraph, Shared
from edge.export.nodes.products import (
    ProductInput,
    embed,
    input_scale,
    linear,
    round_input,
    scale_of,
)
from edge.export.quantize.plan import ModelPlan, Product, Storage
from edge.export.recipes import plan_model, recipe
from edge.launch import Log
from edge.mixers.base import MixerConfig
from edge.rope import inverse_frequencies
from edge.tensors import head_columns

GRAPH_FILE = "graphs/ort.onnx"
WEIGHT_FILE = "weights.bin"
# A score this low has weight 0 after softmax, yet stays finite in sums.
_MASKED = -1e9

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BuiltGraph:
    """Result of `build_graph`.

    Attributes:
        graph, weights: paths of the files.
        opsets: domain → version.
        weight_bytes: size of weights.bin.
        matrices: bits → number of embedding, head and linear weights stored with that width.
        state_dtypes: graph input → type, for states that are not fp32.
        scan_logs: graph input → its log, for inputs that feed logged rows back to scans.
    """

    graph: Path
    weights: Path
    opsets: dict[str, int]
    weight_bytes: int
    matrices: dict[int, int]
    state_dtypes: dict[str, Literal["int8", "float16"]]
    scan_logs: dict[str, Log]


def build_graph(
    config: ModelConfig,
    tensors: TensorSource,
    out_dir: str | Path,
    plan: ModelPlan | str = "fp32",
    *,
    hessian: HessianOf | None = None,
    progress: Progress | None = None,
) -> BuiltGraph:
    """Write `graphs/ort.onnx` and `weights.bin` under `out_dir` (which must exist).

    Tensors are fetched one at a time, so peak memory is one tensor and its quantized copy. `plan`
    may be the name of a recipe that needs no calibration. GPTQ rounds the 4-bit matrices that
    `hessian` knows. The same config, tensors and plan give the same bytes. Initializers point to
    "weights.bin" in the bundle's folder: load the graph from bytes, with
    `session.model_external_initializers_file_folder_path` set to that folder.

    Raises ExportError when a tensor's shape or values do not fit the config or the plan.
    """
    if isinstance(plan, str):
        plan = plan_model(config, recipe(plan))
    out = Path(out_dir)
    (out / GRAPH_FILE).parent.mkdir(parents=True, exist_ok=True)
    with (out / WEIGHT_FILE).open("wb") as file:
        weights = WeightWriter(file)
        g = GraphBuilder(config, tensors, weights, hessian)
        _assemble(g, plan, progress or (lambda what, done, total: None))
        model = g.model()
    data = model.SerializeToString(deterministic=True)
    (out / GRAPH_FILE).write_bytes(data)
    return BuiltGraph(
        graph=out / GRAPH_FILE,
        weights=out / WEIGHT_FILE,
        opsets={entry.domain: entry.version for entry in model.opset_import},
        weight_bytes=weights.size,
        matrices=g.matrices(),
        state_dtypes=g.state_dtypes,
        scan_logs=g.scan_logs,
    )


def _assemble(g: GraphBuilder, plan: ModelPlan, progress: Progress) -> None:
    config = g.config
    shared = _declare_inputs(g, plan)
    count = len(config.layers) + 2
    progress("embedding", 0, count)
    # a layer without a norm before it reads the embedding under its own name
    first = "layers.0.normed" if config.layers[0].norms == "behind" else "embedded"
    x, added = embed(g, "tokens", "embedding.weight", plan.embedding, first), ""
    embedded, aside = x, ""
    for i, (layer, layer_plan) in enumerate(zip(config.layers, plan.layers, strict=True)):
        progress(f"layer {i}", i + 1, count)
        prefix = f"layers.{i}"
        reader = next(iter(layer_plan.products.values()))
        mixer, names = mixer_of(layer), (f"{prefix}.normed", f"{prefix}.residual")
        matrices = mixer.matrices(config.d_model)
        at = LayerGraph(g, prefix, layer_plan, shared, matrices, mixer.weight)
        if layer.is_parallel:  # x is still the input of the previous layer
            u, _ = _layer_input(g, layer, x, "", f"{prefix}.norm", names, reader)
            added = g.node("Add", [added, _add_mixer(at, layer, mixer, u)], f"{prefix}.beside")
            continue
        if layer.is_aside:
            if not aside:
                x, added = g.node("Add", [x, added], f"{prefix}.stream") if added else x, ""
                aside = g.node("Concat", [x, embedded], f"{prefix}.recalled", axis=-1)
            width = layer.input_width(config.d_model)
            u, _ = _layer_input(g, layer, aside, "", f"{prefix}.norm", names, reader, width)
            aside = _add_mixer(at, layer, mixer, u)
            continue
        u, total = _layer_input(g, layer, x, aside or added, f"{prefix}.norm", names, reader)
        x, aside = x if aside else total, ""
        added = _add_mixer(at, layer, mixer, u)
    progress("head", count - 1, count)
    # Only the requested rows go through the head, which is a third of a small model.
    x = g.node("Gather", [x, "rows"], "wanted.residual", axis=0)
    added = g.node("Gather", [added, "rows"], "wanted.added", axis=0)
    hidden, _ = _norm(g, x, added, "norm_f", ("final", "final.residual"), plan.head)
    _add_head(g, hidden, plan.head)
    g.outputs.insert(0, g.outputs.pop(_declare_logits(g)))
    progress("head", count, count)


def _add_head(g: GraphBuilder, hidden: ProductInput, product: Product) -> None:
    config, ids, cap = g.config, g.config.head_ids, g.config.logits_softcap
    matrix, make = "embedding.weight" if config.tie_embeddings else "lm_head.weight", None
    if ids is not None:
        matrix, make = "head.weight", lambda: g.tensor("embedding.weight")[[*ids]]
    logits = "logits" if ids is None else "logits.few"
    linear(g, hidden, matrix, logits if cap is None else "logits.uncapped", product, make=make)
    if cap is not None:
        g.call("SoftCap", ["logits.uncapped"], [logits], cap=cap)
    if ids is not None:
        columns = g.raw("head.columns", head_columns(ids, config.vocab_size))
        g.call("ExpandLogits", [logits, columns], ["logits"])


def _declare_logits(g: GraphBuilder) -> int:
    g.output("logits", ["L", "B", g.config.vocab_size])
    return len(g.outputs) - 1


def _layer_input(
    g: GraphBuilder,
    layer: MixerConfig,
    x: str,
    added: str,
    name: str,
    outputs: tuple[str, str],
    reader: Product,
    width: int | None = None,
) -> tuple[ProductInput, str]:
    """Return the layer's input, made from x + added, and x + added; arguments as for `_norm`."""
    if layer.norms != "behind":
        return _norm(g, x, added, name, outputs, reader, width)
    if added:
        x = g.node("Add", [x, added], outputs[0])
    return round_input(g, x, reader, width or g.config.d_model), x


def _add_mixer(at: LayerGraph, layer: MixerConfig, mixer: MixerExport[Any], u: ProductInput) -> str:
    """Add a mixer, and the norm after it if there is one; return what it adds to the stream."""
    y, g = mixer.nodes(at, u), at.g
    if layer.norms == "before":
        return y
    name = at.named("post_norm")
    return _norm(g, y, "", name, (name, ""), Product(Storage(32)))[0].value


def _norm(
    g: GraphBuilder,
    x: str,
    added: str,
    name: str,
    outputs: tuple[str, str],
    reader: Product,
    width: int | None = None,
) -> tuple[ProductInput, str]:
    """Return norm(x + added) as `reader` reads it, and x + added; without `added`, of x alone."""
    weights = [g.weight(f"{name}.weight")]
    kind, (output, total), width = "RMSNorm", outputs, width or g.config.d_model
    if g.config.norm.kind == "layernorm":
        weights.append(g.weight(f"{name}.bias"))
        kind = "LayerNorm"
    fuses_rounding = kind == "RMSNorm" and reader.input is not None and reader.input.plain
    if fuses_rounding and not reader.outliers:
        weights.append(scale_of(g, f"{output}.scale", input_scale(reader, width)))
        kind, output = "RMSNormQuantize", f"{output}.q"
    eps = g.config.norm.eps
    if added:
        y, x = g.call(f"Add{kind}", [x, added, *weights], [output, total], eps=eps)
    else:
        y = g.call(kind, [x, *weights], [output], eps=eps)[0]
    rounded = (
        ProductInput(rounded=y) if kind == "RMSNormQuantize" else round_input(g, y, reader, width)
    )
    return rounded, x


def _declare_inputs(g: GraphBuilder, plan: ModelPlan) -> Shared:
    """Declare the inputs that this model needs, and compute the values that layers share."""
    shared = Shared()
    g.input("tokens", "i64", ["T", "B"])
    g.input("rows", "i64", ["L"])
    for width in g.config.conv_widths:
        # rows of concat(conv_state, x): each token's window, and the rows to keep as state
        shared.taps[width] = (
            g.input(f"taps{width}", "i64", ["T", width]),
            g.input(f"kept_taps{width}", "i64", ["R", width - 1]),
        )
    layers = [
        (mixer_of(layer), layer_plan)
        for layer, layer_plan in zip(g.config.layers, plan.layers, strict=True)
    ]
    if any(mixer.walks(layer_plan) for mixer, layer_plan in layers):
        g.input("kept", "i64", ["R"])
        g.input("parents", "i64", ["T"])
        g.input("tree", "bool", [])
        g.input("last_only", "bool", [])
    if any(mixer.logs(layer_plan) for mixer, layer_plan in layers):
        g.input("stored", "i64", ["S"])
        g.input("paths", "f32", ["M", "M"])
    if g.config.has_attention:
        g.input("ancestors", "f32", ["T", "T"])
        _declare_attention_inputs(g, shared)
    return shared


def _declare_attention_inputs(g: GraphBuilder, shared: Shared) -> None:
    g.input("positions", "i64", ["T"])
    g.input("past", "i64", [1])
    g.input("total", "i32", [])
    g.input("last", "i32", ["B"])
    # [1, 1, T, past+T]: a query sees every token before the run, and its ancestors in the run.
    steps = g.node("Shape", ["ancestors"], "steps", start=0, end=1)
    past_shape = g.node("Concat", [steps, "past"], "before.shape", axis=0)
    past_bias = g.node("ConstantOfShape", [past_shape], "before")
    blocked = g.node("Sub", ["ancestors", g.floats("one", np.ones(1, np.float32))], "outside")
    penalty = g.floats("masked", np.full(1, -_MASKED, np.float32))
    run_bias = g.node("Mul", [blocked, penalty], "inside")
    bias = g.node("Concat", [past_bias, run_bias], "bias.matrix", axis=1)
    lead_axes = g.integers([0, 1])
    windows = {layer.looks_back for layer in g.config.layers if layer.attends}
    if None in windows:
        shared.biases[None] = g.node("Unsqueeze", [bias, lead_axes], "bias")
    sliding = sorted(window for window in windows if window is not None)
    if sliding:
        distances, masked = _key_distances(g), g.floats("hidden", np.full(1, _MASKED, np.float32))
    for window in sliding:
        far = g.node("GreaterOrEqual", [distances, g.integers([window])], f"far{window}")
        window_bias = g.node("Where", [far, masked, bias], f"bias{window}.matrix")
        shared.biases[window] = g.node("Unsqueeze", [window_bias, lead_axes], f"bias{window}")
    for layer in g.config.layers:
        rope = layer.rotation
        if rope is not None and rope not in shared.rotations:
            shared.rotations[rope] = _rotation(g, rope, len(shared.rotations))


def _key_distances(g: GraphBuilder) -> str:
    """Return the distance of each key's position behind each query's, [T, past+T]."""
    count = g.node("Squeeze", ["past"], "past.count")
    first, step = (g.node("Squeeze", [g.integers([n])], f"count.{n}") for n in (0, 1))
    past_positions = g.node("Range", [first, count, step], "past.positions")
    key_positions = g.node("Concat", [past_positions, "positions"], "key.positions", axis=0)
    column = g.node("Unsqueeze", ["positions", g.integers([1])], "query.positions")
    return g.node("Sub", [column, key_positions], "behind")


def _rotation(g: GraphBuilder, rope: RopeConfig, number: int) -> tuple[str, str]:
    """Return cos and sin of position · inverse frequency, each [T, dim/2]."""
    prefix = f"rope{number}"
    inverse = g.floats(f"{prefix}.inverse", inverse_frequencies(rope))
    real = g.node("Cast", ["positions"], f"{prefix}.positions", to=1)
    column = g.node("Unsqueeze", [real, g.integers([1])], f"{prefix}.column")
    angle = g.node("Mul", [column, inverse], f"{prefix}.angle")
    return g.node("Cos", [angle], f"{prefix}.cos"), g.node("Sin", [angle], f"{prefix}.sin")
