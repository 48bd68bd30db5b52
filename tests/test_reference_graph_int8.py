"""Every node of int8 graphs, run by the references, against its ONNX body on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_model

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig
from edge.export.graph import GRAPH_FILE, build_graph
from edge.export.graph.run import GraphRunner, open_reference
from edge.export.mixers import mixer_of
from edge.export.quantize.plan import (
    INT8,
    INT8_ROWS,
    LayerPlan,
    ModelPlan,
    Product,
    Rounding,
    ScanPlan,
    StateType,
    Storage,
)
from edge.plugins.catalogue import OPS
from edge.plugins.onnx import op_of
from edge.tensors import tensor_shapes
from tests.checkpoints import random_tensor
from tests.int8_recurrent import UNSIGNED
from tests.onnx_ops import run_op

SITES = ("conv_in", "z", "x", "dt", "B", "C")
# Enough tokens for many rounded values; odd, and more than one.
TOKENS, BATCH = 37, 1
CONFIG = ModelConfig(
    family="test",
    vocab_size=40,
    d_model=64,
    layers=(
        Mamba1Config(d_inner=128, d_state=8, dt_rank=4),
        AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=16),
        MlpConfig(d_intermediate=96),
        Mamba2Config(d_inner=128, d_ssm=128, d_state=8, head_dim=16, n_groups=2),
        Mamba2Config(d_inner=128, d_ssm=128, d_state=8, head_dim=32, gated_norm=False),
    ),
)


def scale(most: float, channels: int = 1) -> NDArray[np.float32]:
    return (most / 127 * np.linspace(0.8, 1.2, channels)).astype(np.float32)


def tensors() -> dict[str, torch.Tensor]:
    """Return weights that keep values near 1, so that a scale of 4/127 covers them."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: random_tensor(name, shape, generator) for name, shape in tensor_shapes(CONFIG).items()
    }


def plan(
    product: Callable[[str, int], Product],
    state: StateType,
    fused: bool,
    site: NDArray[np.float32] | None,
) -> ModelPlan:
    layers = []
    for layer in CONFIG.layers:
        products = {
            name: product(name, matrix.columns)
            for name, matrix in mixer_of(layer).matrices(CONFIG.d_model).items()
        }
        scan = None
        if isinstance(layer, Mamba1Config | Mamba2Config):
            sites = dict.fromkeys(SITES, Rounding(site))
            scan = ScanPlan(fused, sites, state=state, state_scale=scale(0.5))
        layers.append(LayerPlan(products, scan))
    return ModelPlan("int8", INT8_ROWS, Product(INT8_ROWS, Rounding(scale(4))), tuple(layers))


def static(name: str, columns: int) -> Product:
    return Product(INT8, Rounding(scale(4), rotate=name == "out_proj"))


def one_scale(name: str, columns: int) -> Product:
    return Product(INT8, Rounding(scale(4)))


THRESHOLD = 1.5


def dynamic(name: str, columns: int) -> Product:
    if name == "qkv_proj":
        return Product(INT8_ROWS, Rounding(None, threshold=THRESHOLD))
    return Product(INT8, Rounding(None, rotate=name == "out_proj"))


def four_bits(name: str, columns: int) -> Product:
    big = columns % 32 == 0
    return Product(Storage(4, 32) if big else INT8, Rounding(scale(4)))


def minimums(name: str, columns: int) -> Product:
    kept = four_bits(name, columns)
    return replace(kept, weight=replace(kept.weight, minimum=kept.weight.bits == 4))


def by_channel(name: str, columns: int) -> Product:
    outliers = (1, 3) if columns > 8 else ()
    return Product(INT8, Rounding(scale(4, columns)), outliers=outliers)


PLANS: dict[str, ModelPlan] = {
    "fused": plan(static, "fp32", True, scale(4)),
    "fused, state fp16": plan(one_scale, "fp16", True, scale(4)),
    "fused, state int8": plan(static, "int8", True, scale(4)),
    "not fused": plan(one_scale, "fp32", False, scale(4)),
    "dynamic": plan(dynamic, "fp32", False, None),
    "four bits": plan(four_bits, "fp32", False, scale(4)),
    "four bits, fused": plan(four_bits, "fp32", True, scale(4)),
    "minimums": plan(minimums, "fp32", False, scale(4)),
    "minimums, fused": plan(minimums, "fp32", True, scale(4)),
    "by channel": plan(by_channel, "fp32", False, scale(4)),
}
EXPECTED = {
    "fused": {
        "AddRMSNormQuantize", "RMSNormQuantize", "LinearInt8", "LinearInt8Quantize",
        "CausalConv1dInt8", "SelectiveScanInt8", "SelectiveScanHeadsInt8", "GatedRMSNormInt8",
        "HadamardQuantize", "EmbedInt8", "Quantize", "Dequantize",
    },
    "not fused": {"FakeQuantize"},
    "dynamic": {
        "QuantizeRows", "SplitQuantizeRows", "LinearInt8Rows", "Hadamard", "FakeQuantizeRows",
    },
    "four bits": {"LinearInt4"},
    "four bits, fused": {"LinearInt4Quantize"},
    "minimums": {"LinearInt4Minimum"},
    "minimums, fused": {"LinearInt4MinimumQuantize"},
}  # fmt: skip


INT8_OPS = set.union(*EXPECTED.values())
# tested beside its kernels, in tests/kernels/test_experts.py; in
# tests/test_ops_quantized_recurrent.py
ELSEWHERE = {"ExpertLinearInt8", "SelectiveScanGroupsInt8"}


def run_signed(
    name: str, inputs: dict[str, NDArray[Any]], **attributes: float
) -> dict[str, NDArray[Any]]:
    """Run a body with int8 values in and out, even if it holds them as u8 with 128 added."""
    op = op_of(name)
    held = {v.name for v in op.inputs if {"i8", "u8"} <= {*v.dtypes}} | {*UNSIGNED.get(op.name, ())}
    for each in held & inputs.keys():
        inputs[each] = (inputs[each].astype(np.int16) + 128).astype(np.uint8)
    # CPUs without VNNI multiply exactly by weights that the graph has
    found = run_op(name, "ort", inputs, constant=True, **attributes)
    return {
        output: (y.astype(np.int16) - 128).astype(np.int8) if y.dtype == np.uint8 else y
        for output, y in found.items()
    }


def run(folder: Path) -> tuple[onnx.ModelProto, dict[str, NDArray[Any]]]:
    """Return a graph and all its values: inputs, constants, and the results of two runs by the
    references.
    """
    graph = open_reference(folder)
    runner = GraphRunner(graph, CONFIG)
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    load_external_data_for_model(model, str(folder))
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, TOKENS + 3))
    state = runner.initial(BATCH, TOKENS + 3)
    _, (state,) = runner.run(tokens[:, :3], state)
    feeds = runner.feeds(tokens[:, 3:], state, kept=[1, TOKENS // 2, TOKENS - 1])

    def keep(name: str, tensor: torch.Tensor) -> None:
        values[name] = tensor.contiguous().numpy()

    graph.hook = keep
    graph.run(None, feeds)
    return model, values | feeds


@pytest.mark.parametrize("name", PLANS)
def test_every_int8_node_is_its_body(name: str, tmp_path: Path) -> None:
    build_graph(CONFIG, tensors(), tmp_path, PLANS[name])
    model, values = run(tmp_path)
    seen, rounded, apart = set(), 0, 0
    for node in model.graph.node:
        if node.domain != "edge" or op_of(node.op_type).name not in INT8_OPS:
            continue
        op = op_of(node.op_type)
        seen.add(op.name)
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        # unused inputs at the end are left out
        inputs = (
            {"ancestors": np.zeros((0, 0), np.float32)} if op.name.endswith("HeadsInt8") else {}
        )
        inputs |= {v.name: values[n] for v, n in zip(op.inputs, node.input, strict=False)}
        found = run_signed(node.op_type, inputs, **attributes)
        for v, output in zip(op.outputs, node.output, strict=True):
            ours, theirs = values[output], found[v.name]
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            if ours.dtype == np.int8:
                steps = np.abs(ours.astype(int) - theirs.astype(int))
                assert steps.max() <= 1 and ours.any(), output
                rounded, apart = rounded + steps.size, apart + int(steps.sum())
            else:
                wide, other = ours.astype(np.float64), theirs.astype(np.float64)
                allowed = 1e-3 if ours.dtype == np.float16 else 1e-5
                assert np.abs(wide - other).max() <= allowed * np.abs(other).max() > 0, output
    assert EXPECTED.get(name, set()) <= seen
    assert rounded > 10_000 and apart <= rounded / 10_000


def test_a_product_with_outliers_is_the_papers(tmp_path: Path) -> None:
    """LLM.int8(), section 3.2, token by token: values at or above the threshold are multiplied in
    16 bits, all others in integers, with one scale per token and one per row.
    """
    build_graph(CONFIG, tensors(), tmp_path, PLANS["dynamic"])
    _, values = run(tmp_path)
    stored = [tensors()[f"layers.1.{part}_proj.weight"].numpy() for part in "qkv"]
    w = np.concatenate(stored).astype(np.float64)
    steps = np.abs(w).max(1) / 127
    counts = set()
    for x, y in zip(values["layers.1.normed"][:, 0], values["layers.1.qkv"][:, 0], strict=True):
        large = np.abs(x) >= THRESHOLD
        scale_of_x = np.abs(x[~large]).max() / 127
        q, rows = np.rint(x[~large] / scale_of_x), np.rint(w[:, ~large] / steps[:, None])
        wanted = scale_of_x * steps * (rows @ q) + w[:, large].astype(np.float16) @ x[large]
        np.testing.assert_allclose(y, wanted, atol=2e-3 * np.abs(wanted).max())
        counts.add(int(large.sum()))
    assert len(counts) > 3  # every token has its own columns


def test_every_int8_op_is_in_one_of_these_graphs() -> None:
    for op in OPS.values():
        on_int8 = any("i8" in v.dtypes for v in (*op.inputs, *op.outputs))
        assert op.name in INT8_OPS | ELSEWHERE or not on_int8, op.name
