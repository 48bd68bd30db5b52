"""Models with random weights, and a bundle of one, made in seconds."""

from __future__ import annotations

import math
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import edge
from edge.bundle import BundleWriter, Limits, Provenance, Quantization
from edge.bundle.manifest import TokenizerInfo
from edge.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    Mixer,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from edge.errors import InputError
from edge.tensors import tensor_shapes

Array = NDArray[np.float32]
SEED = 20261121
EMBEDDING_STD = 0.02  # larger, and every token would predict itself through the tied head
DT_RANGE = (1e-3, 0.1)  # range of Δ at the start of training Mamba
CALIBRATION = (4, 48)  # sequences and tokens of random ids that scales are calibrated on


def _model(family: str, d_model: int, layers: tuple[Mixer, ...], vocab: int) -> ModelConfig:
    return ModelConfig(
        family=family,
        d_model=d_model,
        vocab_size=vocab,
        layers=layers,
        norm=NormConfig(),
        tie_embeddings=True,
    )


def _mamba(d_model: int, layers: int, vocab: int = 50280) -> ModelConfig:
    mixer = Mamba1Config(d_inner=2 * d_model, dt_rank=-(-d_model // 16))
    return _model("mamba", d_model, (mixer,) * layers, vocab)


def _mamba2(d_model: int, layers: int, d_state: int = 128, vocab: int = 50288) -> ModelConfig:
    inner = 2 * d_model
    mixer = Mamba2Config(d_inner=inner, d_ssm=inner, head_dim=min(64, inner), d_state=d_state)
    return _model("mamba2", d_model, (mixer,) * layers, vocab)


def _hybrid(d_model: int, blocks: int, vocab: int = 50288) -> ModelConfig:
    """Return alternating Mamba-2 and attention layers, each followed by a gated MLP."""
    mixer = _mamba2(d_model, 1).layers[0]
    heads = max(1, d_model // 64)
    attention = AttentionConfig(
        n_heads=heads,
        n_kv_heads=max(1, heads // 4),
        head_dim=64,
        rope=RopeConfig(theta=10_000.0, dim=64),
    )
    mlp = MlpConfig(d_intermediate=2 * d_model)
    return _model("bamba", d_model, (mixer, mlp, attention, mlp) * blocks, vocab)


def _deltanet(d_model: int, blocks: int, d_state: int = 128, vocab: int = 248320) -> ModelConfig:
    """Return Qwen3.5's blocks: three Gated DeltaNet layers, gated attention, an MLP after each."""
    heads = max(1, d_model // 128)
    mixer = GatedDeltaNetConfig(
        n_heads=2 * heads, head_dim=d_state, n_groups=2 * heads, d_state=d_state
    )
    attention = AttentionConfig(
        n_heads=heads,
        n_kv_heads=max(1, heads // 4),
        head_dim=2 * d_state,
        rope=RopeConfig(theta=1e7, dim=d_state // 2),
        qk_norm=True,
        output_gate=True,
    )
    mlp = MlpConfig(d_intermediate=7 * d_model // 2)
    block = (mixer, mlp, mixer, mlp, mixer, mlp, attention, mlp)
    return _model("qwen3_5", d_model, block * blocks, vocab)


# shapes of `make bench`: sizes of the published Mamba and Mamba-2 checkpoints, and two for tests
SHAPES: Mapping[str, ModelConfig] = {
    "tiny": _mamba(64, 2, vocab=512),
    "tiny-mamba2": _mamba2(64, 2, d_state=16, vocab=512),
    "130m": _mamba(768, 24),
    "mamba2-130m": _mamba2(768, 24),
    "370m": _mamba(1024, 48),
    "790m": _mamba(1536, 48),
    "1.4b": _mamba(2048, 48),
}
# models of the GPU report, the most important first
MODELS: Mapping[str, ModelConfig] = {
    "mamba-2.8b": _mamba(2560, 64),
    "mamba2-2.7b": _mamba2(2560, 64),
    "hybrid-1b": _hybrid(2048, 8),
    "mamba-1.4b": _mamba(2048, 48),
    "mamba-130m": _mamba(768, 24),
    "qwen3.5-0.8b": _deltanet(1024, 6),
    # for tests of the report, with the interpreter
    "tiny-mamba": _mamba(64, 2, vocab=320),
    "tiny-mamba2": _mamba2(64, 2, d_state=16, vocab=320),
    "tiny-hybrid": _hybrid(64, 1, vocab=320),
    "tiny-deltanet": _deltanet(128, 1, d_state=16, vocab=320),
}
DEFAULT = tuple(name for name in MODELS if not name.startswith("tiny"))


def model_named(name: str, known: Mapping[str, ModelConfig], field: str) -> ModelConfig:
    """Return the model of that name. Raises InputError for an unknown name."""
    if name not in known:
        raise InputError(
            f"unknown model {name!r}", field=field, remedy=f"choose {', '.join(known)}"
        )
    return known[name]


def period(config: ModelConfig) -> int:
    """Return the number of distinct layers: two of one kind, or a hybrid's whole pattern."""
    layers = config.layers
    sizes = (size for size in range(2, len(layers) + 1) if len(layers) % size == 0)
    return next(size for size in sizes if layers == layers[:size] * (len(layers) // size))


class RandomTensors(Mapping[str, Array]):
    """Random canonical tensors by name: one period of layers, drawn once and repeated."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._shapes = tensor_shapes(config)
        self._period = period(config)
        self._drawn: dict[str, Array] = {}

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, name: str) -> Array:
        shape = self._shapes[name]
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(parts[1]) % self._period)
        key = ".".join(parts)
        if key not in self._drawn:
            rng = np.random.default_rng([SEED, zlib.crc32(key.encode())])
            self._drawn[key] = _draw(name, shape, rng, self._config)
            self._drawn[key].flags.writeable = False
        return self._drawn[key]


def _draw(
    name: str, shape: tuple[int, ...], rng: np.random.Generator, config: ModelConfig
) -> Array:
    """Draw as Mamba initializes: states neither decay nor grow, logits differ by about one."""
    last = name.rpartition(".")[2]
    if name.startswith("norm_f"):
        gain = 1 / EMBEDDING_STD / math.sqrt(config.d_model)
        return np.full(shape, gain, np.float32)
    if last == "A_log":
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if last == "D" or "norm" in name:
        return rng.uniform(0.8, 1.2, shape).astype(np.float32)
    if name.endswith(("dt_bias", "dt_proj.bias")):
        low, high = np.log(DT_RANGE)
        dt = np.exp(rng.uniform(low, high, shape))
        return (dt + np.log(-np.expm1(-dt))).astype(np.float32)
    if last == "bias":
        return np.zeros(shape, np.float32)
    std = EMBEDDING_STD if name.startswith("embedding") else 1 / math.sqrt(shape[-1])
    return (std * rng.standard_normal(shape, np.float32)).astype(np.float32)


# -- a bundle -------------------------------------------------------------------------------------


def write_bundle(
    config: ModelConfig,
    quant: str,
    out: Path,
    *,
    chunk: int,
    whole: bool = False,
) -> Path:
    """Write a bundle of `config` in the recipe `quant`.

    It has one period of layers, calibrated alone and repeated, or with `whole` the model of
    `make bench`, calibrated on all layers. Raises ExportError as exporting does.
    """
    from edge.apps.bench.weights import mamba_tensors
    from edge.export.exporter import check_graph
    from edge.export.graph import GRAPH_FILE, build_graph
    from edge.export.kernels import add_kernels, add_plan
    from edge.export.recipes import recipe

    tensors = mamba_tensors(config) if whole else RandomTensors(config)
    calibrated_layers = len(config.layers) if whole else period(config)
    plan = _plan(config, tensors, quant, calibrated_layers, out.parent)
    with BundleWriter(out) as writer:
        built = build_graph(config, tensors, writer.folder, plan)
        check_graph(writer.folder)
        planned = add_plan(writer, GRAPH_FILE, ())
        added = add_kernels(writer, planned, (), lambda *_: None, (0.0, 1.0))
        chosen = recipe(quant)
        writer.finish(
            created_by=f"edge {edge.__version__}",
            model=config,
            quantization=Quantization(recipe=chosen.name, bits=chosen.bits),
            state_dtypes=built.state_dtypes,
            opset=built.opsets,
            graphs={"ort": GRAPH_FILE, **added.graphs},
            kernels=added.kernels,
            limits=Limits(chunk=chunk),
            tokenizer=TokenizerInfo(kind="bytes", vocab_size=256),
            provenance=Provenance(source="random", family=config.family, fingerprint="0" * 64),
        )
    return out


def _plan(
    config: ModelConfig, tensors: Mapping[str, Array], quant: str, size: int, folder: Path
) -> Any:
    """Return the `edge.export.quantize.ModelPlan`, calibrated on the first `size` layers."""
    from edge.export.calibration.calibrate import calibrate, calibration_graph
    from edge.export.calibration.texts import CalibrationText
    from edge.export.graph import build_graph
    from edge.export.recipes import Choices, mixture, plan_model

    short = config.model_copy(update={"layers": config.layers[:size]})
    mixed = mixture(short, quant, Choices())
    observed = mixed.observations()
    if not observed:
        plan = plan_model(short, mixed, fetch=tensors.__getitem__)
    else:
        rng = np.random.default_rng(SEED)
        sequences = rng.integers(0, config.vocab_size, CALIBRATION)
        text = CalibrationText(sequences, len(sequences), "random", "0" * 64)
        with tempfile.TemporaryDirectory(dir=folder) as name:
            build_graph(short, tensors, name)
            calibration = calibrate(
                calibration_graph(name), short, text, observed.values, observed.rotated
            )
        plan = plan_model(short, mixed, calibration=calibration, fetch=tensors.__getitem__)
    return replace(plan, layers=plan.layers * (len(config.layers) // size))
