"""Graphs of plans: their contents, and that ONNX Runtime and the references agree on them."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import load_external_data_for_model

from edge.config import AttentionConfig, Mamba1Config, Mamba2Config, MlpConfig, ModelConfig
from edge.errors import ExportError
from edge.export.exporter import check_graph
from edge.export.graph import build_graph
from edge.export.graph.run import open_session, session_options
from edge.export.graph.verify import compare
from edge.export.quantize import layer_plan
from edge.export.quantize.plan import (
    INT8_ROWS,
    LayerPlan,
    ModelPlan,
    Product,
    Rounding,
    Storage,
)
from edge.export.quantize.weights import dequantize_blocks, quantize_minimum
from edge.export.recipes import Choices, mixture, plan_model
from edge.tensors import tensor_shapes
from tests.quantized_models import built, in_runs, network, plan_of, runners, tokens_of
from tests.test_graph_models import MODELS, logits

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
    """Return values that every library's exp() rounds alike: A_log is 0."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        * (0 if name.endswith("A_log") else 1)
        for name, shape in tensor_shapes(config).items()
    }


@pytest.mark.parametrize(
    ("quant", "expected"),
    [("fp32", "de4589fe3849acf5"), ("fp16", "d23c257c1eb4966e"), ("w8", "aa48f249f78d9b64")],
)
def test_bundles_without_rounded_activations_stay_as_they_were(
    quant: str, expected: str, tmp_path: Path
) -> None:
    """Byte for byte, except the bodies of functions: a change here changes the graph."""
    plan = plan_model(HYBRID, mixture(HYBRID, quant, Choices(kv_cache="fp32")))
    built = build_graph(HYBRID, random_tensors(HYBRID), tmp_path, plan)
    model = onnx.load(built.graph, load_external_data=False)
    del model.functions[:]
    data = model.SerializeToString(deterministic=True) + built.weights.read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == expected


ROUNDING = ("w8a8", "w8a8-o", "w4a8", "w8a8-static", "w8a8-dynamic", "w8a8-smoothquant",
            "w8a8-hadamard")  # fmt: skip


def agree(name: str, folder: Path) -> None:
    """Check ONNX Runtime against the references: over a prefill, odd chunks and steps.

    A sum halfway between two integers may round either way, and later values are then rounded
    again: rarely, and by no more than rounding costs in the first place.
    """
    engine, reference = runners(name, folder)
    tokens = tokens_of(60, seed=5)
    wanted, after = in_runs(reference, tokens, (60,))
    cost = compare(logits(network(name), tokens), wanted)
    for runs in ((60,), (33, 1, 7, 1, 18)):
        found, state = in_runs(engine, tokens, runs)
        figures = compare(wanted, found)
        assert figures["kl_nats_per_token"] <= max(1e-4, cost["kl_nats_per_token"])
        assert figures["top1_agreement"] >= min(0.995, cost["top1_agreement"])
        for key, array in state.arrays.items():
            if array.dtype == np.int8:
                steps = np.abs(array.astype(int) - after.arrays[key].astype(int))
                assert steps.max(initial=0) <= 2 and steps.mean() <= 0.05, key


@pytest.mark.parametrize("quant", ROUNDING)
@pytest.mark.parametrize("name", MODELS)
def test_every_recipe_runs_every_layer_as_the_references_do(
    name: str, quant: str, tmp_path: Path
) -> None:
    plan = plan_of(name, quant)[1]
    built(name, plan, tmp_path)
    check_graph(tmp_path)
    agree(name, tmp_path)


@pytest.mark.parametrize("state", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba2 groups"])
def test_states_are_kept_in_the_type_asked_for(name: str, state: str, tmp_path: Path) -> None:
    plan = plan_of(name, "w8a8", ssm_state=state)[1]
    made = built(name, plan, tmp_path)
    wanted = {"fp32": {}, "fp16": {"ssm_state": "float16"}, "int8": {"ssm_state": "int8"}}[state]
    layers = range(len(MODELS[name]))
    assert made.state_dtypes == {
        f"layers.{i}.{key}": kind
        for i in layers
        for key, kind in ({"conv_state": "int8"} | wanted).items()
    }
    agree(name, tmp_path)


def test_groups_and_mixtures_run_too(tmp_path: Path) -> None:
    plan = plan_of("mamba2 groups", "w8a8", groups=True)[1]
    assert plan.layers[0].scan is not None and plan.layers[0].scan.fused
    built("mamba2 groups", plan, tmp_path)
    agree("mamba2 groups", tmp_path)
    layers = {"attention": "fp16", "mlp": "w8a8-smoothquant", "mamba1": "w8a8-hadamard"}
    mixed, plan = plan_of("all", "w8a8", layers=layers, embedding="fp16")
    assert mixed.name == "w8a8,mamba1=w8a8-hadamard,attention=fp16,mlp=w8a8-smoothquant"
    built("all", plan, tmp_path)
    agree("all", tmp_path)


@pytest.mark.parametrize("quant", ROUNDING)
def test_every_product_that_was_planned_in_integers_is_one(quant: str, tmp_path: Path) -> None:
    """In the graph as ONNX Runtime optimized it, where a missed fusion would show."""
    plan = plan_of("all", quant)[1]
    built("all", plan, tmp_path)
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(tmp_path, options=options)
    model = onnx.load(tmp_path / "optimized.onnx", load_external_data=False)
    products = plan.products()
    int8 = sum(p.input is not None and p.weight.int8 for p in products)
    int4 = sum(p.input is not None and p.weight.bits == 4 for p in products)
    assert int8 + int4 == len(products)
    counts = Counter(node.op_type for node in model.graph.node)
    integer = sum(counts[op] for op in ("MatMulIntegerToFloat", "QLinearMatMul", "MatMulInteger"))
    assert integer == int8 and counts["MatMulNBits"] == int4
    # The remaining floating-point products have no matrix but the columns left in floating point.
    weights = {i.name for i in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("MatMul", "FusedMatMul", "Gemm"):
            matrices = {i for i in weights & set(node.input) if "_proj" in i or "embed" in i}
            assert all("outliers" in name for name in matrices), matrices
    zero = {i.name: i for i in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMulIntegerToFloat":
            assert zero[node.input[1]].data_type in (TensorProto.INT8, TensorProto.UINT8)


@pytest.mark.parametrize("quant", ["w8a8", "w8", "w4a8"])
def test_experts_that_read_narrow_values_stay_close_to_the_network(
    quant: str, tmp_path: Path
) -> None:
    """Not only to the ops of their graph, with which int8 weights without their scale agree too."""
    built("experts", plan_of("experts", quant)[1], tmp_path)
    tokens = tokens_of(24)
    found, _ = in_runs(runners("experts", tmp_path)[0], tokens, (24,))
    expected = logits(network("experts"), tokens)
    error = float(np.sqrt(np.mean((found - expected) ** 2)) / np.std(expected))
    assert error < (0.15 if quant == "w4a8" else 0.05)


def test_a_constant_of_a_type_that_an_op_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def floating(*_: object) -> tuple[Storage, None]:
        return INT8_ROWS, None

    monkeypatch.setattr(layer_plan, "stored_as", floating)
    with pytest.raises(ExportError, match=r"is int8, but .* takes f32"):
        built("experts", plan_of("experts", "w8a8")[1], tmp_path)


@pytest.mark.parametrize("recipe", ["w4", "w4a16"])
def test_experts_that_come_in_blocks_of_4_bits_keep_their_numbers(
    recipe: str, tmp_path: Path
) -> None:
    net = network("experts")
    tensors = {name: each.detach().numpy().copy() for name, each in net.canonical_tensors().items()}
    for name, each in tensors.items():
        if each.ndim == 3 and each.shape[2] % 32 == 0:
            packed, scales, minimums = quantize_minimum(each.reshape(-1, each.shape[2]), 32)
            tensors[name] = dequantize_blocks(packed, scales, 4, minimums).reshape(each.shape)
    made = build_graph(net.config, tensors, tmp_path, recipe)
    model = onnx.load(made.graph, load_external_data=False)
    load_external_data_for_model(model, str(tmp_path))
    kept = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    for name, of in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        parts = [kept[f"layers.0.{name}.weight.{p}"] for p in ("packed", "scales", "minimums")]
        assert parts[1].dtype == parts[2].dtype == np.float16
        packed, scales, minimums = (part.reshape(-1, *part.shape[2:]) for part in parts)
        found = dequantize_blocks(packed, scales, 4, minimums)
        wanted = np.concatenate([tensors[f"layers.0.{each}.weight"] for each in of], 1)
        np.testing.assert_array_equal(found, wanted.reshape(found.shape))


def test_columns_that_stay_floating_do_not_cost_the_grid_of_their_blocks(tmp_path: Path) -> None:
    """Zeros in their places would: a file's 4-bit codes would then be rounded a second time."""
    config = ModelConfig(
        family="test",
        vocab_size=48,
        d_model=64,
        layers=(MlpConfig(d_intermediate=64, form="gelu"),),
    )
    tensors = random_tensors(config)
    up = "layers.0.up_proj.weight"
    packed, scales, minimums = quantize_minimum(tensors[up], 32)
    tensors[up] = dequantize_blocks(packed, scales, 4, minimums)
    four, one = Storage(4, 64, minimum=True), Rounding(np.full(1, 0.02, np.float32))
    products = {
        "up_proj": Product(four, one, outliers=(3, 40)),
        "down_proj": Product(four, one, outliers=(5,)),
    }
    plan = ModelPlan("test", INT8_ROWS, Product(INT8_ROWS, one), (LayerPlan(products),))
    made = build_graph(config, tensors, tmp_path, plan)
    model = onnx.load(made.graph, load_external_data=False)
    kept = {i.name: i.dims for i in model.graph.initializer}
    assert list(kept[f"{up}.packed"]) == [64, 2, 16]
    assert list(kept["layers.0.down_proj.weight.packed"]) == [64, 1, 32]
