"""A tiny model whose products, convolutions and scans are int8, with scales set by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.bundle import BundleWriter, Limits, Provenance, Quantization, TokenizerInfo
from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig
from edge.export.graph import GRAPH_FILE, build_graph
from edge.export.graph.model import BuiltGraph
from edge.export.mixers import mixer_of
from edge.export.quantize.plan import (
    INT8,
    INT8_ROWS,
    CacheType,
    LayerPlan,
    ModelPlan,
    Product,
    Rounding,
    ScanPlan,
    StateType,
)
from edge.tensors import tensor_shapes

HYBRID = ModelConfig(
    family="test", vocab_size=40, d_model=32, max_context=96,
    layers=(
        Mamba1Config(d_inner=64, d_state=8, dt_rank=4),
        AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8),
        MlpConfig(d_intermediate=48),
        Mamba2Config(d_inner=64, d_ssm=64, d_state=8, head_dim=16),
    ),
)  # fmt: skip


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Return weights that keep values near 1, so that a scale of 4/127 covers them."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        norm = name.endswith(("norm.weight", "norm_f.weight"))
        found[name] = 1 + values / 10 if norm else values / np.float32(np.sqrt(shape[-1]))
    return found


def _scale(most: float) -> NDArray[np.float32]:
    return np.full(1, most / 127, np.float32)


def int8_plan(config: ModelConfig, states: tuple[StateType, ...]) -> ModelPlan:
    """Return an int8 plan; `states` are the types of the scan states, in the order of layers.

    If they are not fp32, keys and values are fp16.
    """
    cache: CacheType = "fp32" if set(states) == {"fp32"} else "fp16"
    left = list(states)
    layers = []
    for layer in config.layers:
        products = {
            name: Product(INT8, Rounding(_scale(4), rotate=name == "out_proj"))
            for name in mixer_of(layer).matrices(config.d_model)
        }
        scan = None
        if isinstance(layer, Mamba1Config | Mamba2Config):
            sites = {s: Rounding(_scale(4)) for s in ("conv_in", "z", "x", "dt", "B", "C")}
            scan = ScanPlan(fused=True, sites=sites, state=left.pop(0), state_scale=_scale(0.5))
        layers.append(LayerPlan(products, scan, cache))
    return ModelPlan("int8", INT8_ROWS, Product(INT8_ROWS, Rounding(_scale(4))), tuple(layers))


def save_int8_bundle(folder: Path, states: tuple[StateType, ...]) -> Path:
    """Save the same as a bundle, which reads bytes though it knows only 40 tokens."""
    with BundleWriter(folder) as writer:
        built = build_int8(writer.folder, states)
        writer.finish(
            created_by="a test",
            model=HYBRID,
            quantization=Quantization(recipe="int8", bits=8),
            state_dtypes=built.state_dtypes,
            opset=built.opsets,
            graphs={"ort": GRAPH_FILE},
            limits=Limits(chunk=64),
            tokenizer=TokenizerInfo(kind="bytes", vocab_size=256),
            provenance=Provenance(source="a test", family="test", fingerprint="0" * 64),
        )
    return folder


def build_int8(folder: Path, states: tuple[StateType, ...]) -> BuiltGraph:
    """The hybrid above under `folder`."""
    return build_graph(HYBRID, random_tensors(HYBRID), folder, int8_plan(HYBRID, states))
