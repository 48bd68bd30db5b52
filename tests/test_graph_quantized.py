"""Graphs of plans: what each says, and that ONNX Runtime and the references agree on them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig
from edge.export.graph import build_graph
from edge.tensors import tensor_shapes

HYBRID = ModelConfig(
    family="test",
    vocab_size=96,
    d_model=64,
    layers=(
        Mamba1Config(d_inner=128, d_state=8, dt_rank=4),
        AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16),
        MlpConfig(d_intermediate=48, bias=True),
        Mamba2Config(d_inner=128, d_ssm=128, d_state=16, head_dim=32),
    ),
)


def random_tensors(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Of values that no library's exp() rounds in its own way: A_log is 0."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        * (0 if name.endswith("A_log") else 1)
        for name, shape in tensor_shapes(config).items()
    }


@pytest.mark.parametrize(
    ("quant", "expected"),
    [("fp32", "8b8c77777fa3b35a"), ("fp16", "70cbdb67d674197d"), ("w8", "082db9a21c82cafc")],
)
def test_bundles_without_rounded_activations_stay_as_they_were(
    quant: str, expected: str, tmp_path: Path
) -> None:
    """Byte for byte as before there were plans, but for the bodies of functions."""
    built = build_graph(HYBRID, random_tensors(HYBRID), tmp_path, quant)
    model = onnx.load(built.graph, load_external_data=False)
    del model.functions[:]
    data = model.SerializeToString(deterministic=True) + built.weights.read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == expected
