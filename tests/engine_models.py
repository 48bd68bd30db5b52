"""Tiny models of every mixer: a graph on disk and the torch network with the same weights, on the
engines `ort` and `cpu`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from edge.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Mamba1Config,
    Mamba2Config,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
)
from edge.export.graph import build_graph
from edge.export.network import Network
from edge.export.quantize.plan import StateType
from edge.plugins.cpu import library
from edge.runtime.cuda.engine import CudaEngine
from edge.runtime.ort import OrtEngine
from tests import int8_models, on_device
from tests.cuda.models import cuda_engine
from tests.rounded_states import round_states

MAMBA1 = Mamba1Config(d_inner=24, d_state=4, d_conv=4, dt_rank=3)
MAMBA2 = Mamba2Config(d_inner=24, d_ssm=24, d_state=8, d_conv=4, head_dim=8, n_groups=1)
ATTENTION = AttentionConfig(
    n_heads=4, n_kv_heads=2, head_dim=6, rope=RopeConfig(dim=4), qkv_bias=True
)
MLP = MlpConfig(d_intermediate=20)
SLIDING = 5  # tokens that a layer of `sliding` attends to
DELTANET = GatedDeltaNetConfig(n_heads=4, head_dim=6, n_groups=2, d_state=5, d_conv=3)

CONFIGS = {
    "mamba1": ModelConfig(
        family="mamba", vocab_size=40, d_model=12, layers=(MAMBA1, MAMBA1.model_copy(
            update={"d_conv": 3, "conv_bias": False})),
    ),
    "mamba2": ModelConfig(
        family="mamba2", vocab_size=40, d_model=12, layers=(MAMBA2, Mamba2Config(
            d_inner=24, d_ssm=16, d_state=4, head_dim=4, n_groups=2, dt_limit=(0.0, 0.05))),
        tie_embeddings=False,
    ),
    "attention": ModelConfig(
        family="llama", vocab_size=40, d_model=12, layers=(ATTENTION, MLP, ATTENTION),
        max_context=96,
    ),
    "hybrid": ModelConfig(
        family="bamba", vocab_size=40, d_model=12, layers=(MAMBA2, ATTENTION, MLP, MAMBA1),
        norm=NormConfig(kind="layernorm"), max_context=96,
    ),
    "sliding": ModelConfig(
        family="mistral", vocab_size=40, d_model=12, layers=(
            ATTENTION.model_copy(update={"window": SLIDING}), MLP, ATTENTION), max_context=96,
    ),
    "deltanet": ModelConfig(
        family="qwen3_5", vocab_size=40, d_model=12, layers=(DELTANET, ATTENTION),
        max_context=96,
    ),
    "drafter": ModelConfig(
        family="mamba", vocab_size=40, d_model=12, layers=(MAMBA1,),
        head_ids=(0, 1, 2, *range(8, 40, 2)),
    ),
}  # fmt: skip
KINDS = tuple(CONFIGS)

# the same models with states other than fp32: kind → kind of the model, state → type
ROUNDED: dict[str, tuple[str, dict[str, str]]] = {
    "mamba1-float16": ("mamba1", {"layers.1.ssm_state": "float16"}),
    # a scan state with logs is never rounded
    "mamba2-int8": ("mamba2", {f"layers.{i}.conv_state": "int8" for i in range(2)}),
    "hybrid-mixed": ("hybrid", {
        "layers.0.conv_state": "int8", "layers.3.conv_state": "float16",
        "layers.3.ssm_state": "int8"}),
}  # fmt: skip
# int8 throughout: kind → types of the scan states; `int8-mixed` keeps keys and values in fp16
INT8: dict[str, tuple[StateType, ...]] = {
    "int8": ("fp32", "fp32"),
    "int8-mixed": ("int8", "fp16"),
}
ALL_KINDS = (*KINDS, *ROUNDED, *INT8)
# ROUNDED are graphs of tests, for which no kernels exist
CPU_KINDS = (*KINDS, *INT8) if library.path() is not None else ()
# every model on every engine that runs it
RUN_KINDS = (*((kind, "ort") for kind in ALL_KINDS), *((kind, "cpu") for kind in CPU_KINDS))


def plain(kind: str) -> str:
    """Return the kind of the model, whatever the types of its states."""
    return ROUNDED[kind][0] if kind in ROUNDED else kind


def config_of(kind: str) -> ModelConfig:
    return int8_models.HYBRID if kind in INT8 else CONFIGS[plain(kind)]


@functools.cache
def network(kind: str) -> Network:
    """Return the torch network with random weights, including norms and biases."""
    torch.manual_seed(KINDS.index(kind))
    made = Network(CONFIGS[kind]).eval()
    for name, parameter in made.canonical_tensors().items():
        if name.endswith((".bias", "norm.weight", "norm_f.weight")):
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    return made


@functools.cache
def folder(kind: str) -> Path:
    """Return the folder of the model's graph and weights; it is removed at exit."""
    path = Path(_ROOT.name) / kind
    path.mkdir()
    tensors = {name: t.numpy() for name, t in network(kind).canonical_tensors().items()}
    build_graph(CONFIGS[kind], tensors, path)
    return path


_ROOT = tempfile.TemporaryDirectory(prefix="edge-models-")


@functools.cache
def engine(kind: str) -> OrtEngine:
    path, dtypes = _graph(kind)
    return OrtEngine(path, config_of(kind), threads=1, chunk=64, state_dtypes=dtypes)


@functools.cache
def cpu_engine(kind: str) -> CudaEngine:
    """Return the engine `cpu`, whose chunk lets caches of `sliding` slide within 40 tokens."""
    path, dtypes = _graph(kind)
    with on_device.running(library.instruction_sets()[-1]):
        return cuda_engine(path, config_of(kind), dtypes, 12, engine(kind).identity)


def engine_of(kind: str, name: str) -> OrtEngine | CudaEngine:
    return engine(kind) if name == "ort" else cpu_engine(kind)


@functools.cache
def _graph(kind: str) -> tuple[Path, Mapping[str, str]]:
    """Return the graph, and its states that are not fp32."""
    if kind in INT8:
        path = Path(_ROOT.name) / kind
        path.mkdir()
        built = int8_models.build_int8(path, INT8[kind])
        return built.graph, built.state_dtypes
    path = folder(plain(kind)) / "graphs/ort.onnx"
    if kind not in ROUNDED:
        return path, {}
    dtypes = ROUNDED[kind][1]
    graph = round_states(path.read_bytes(), dtypes)
    path = path.with_name(f"{kind}.onnx")
    path.write_bytes(graph)
    return path, dtypes


def tokens(count: int, *, batch: int = 1, seed: int = 0) -> np.ndarray:
    """Random ids [batch, count]."""
    return np.random.default_rng(seed).integers(0, 40, (batch, count))
