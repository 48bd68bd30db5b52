"""How ONNX Runtime optimizes a chain of int8 ops: only integer products, and nothing is left for
run time that can be done on loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge import cpu
from edge.ops import DOMAIN, VERSION
from edge.plugins.catalogue import OPS
from edge.plugins.hadamard import reference as hadamard
from edge.plugins.hadamard.matrices import factors
from edge.plugins.linear import reference as linear
from edge.plugins.norm import reference as norm
from edge.plugins.onnx import OPSETS, function
from edge.plugins.quantize import reference as quantize

Array = NDArray[Any]
D, E = 64, 96
OUTPUTS = ("y", "sum", "hidden")
PRODUCTS = {"MatMulIntegerToFloat", "QLinearMatMul"}


def constants(rng: np.random.Generator, per_row: bool) -> dict[str, Array]:
    def positive(count: int, about: float) -> Array:
        chosen = count if per_row else 1
        return (about * rng.uniform(0.5, 1.5, chosen)).astype(np.float32)

    def int8(*shape: int) -> Array:
        # the ends of the range, which a saturating product gets wrong
        return rng.choice(np.array([-128, -127, -90, 3, 100, 127], np.int8), shape)

    slow, fast = factors(E)
    return {
        "norm": rng.uniform(0.5, 2, D).astype(np.float32),
        "norm_scale": positive(D, 0.02),
        "in_scale": np.array([0.02], np.float32),
        "in_proj": int8(E, D),
        "in_proj_scale": positive(E, 0.01),
        "hidden_scale": positive(E, 0.2),
        "slow": slow,
        "fast": fast,
        "turned_scale": positive(E, 0.3),
        "turned_one": np.array([0.3], np.float32),
        "out_proj": int8(D, E),
        "out_proj_scale": positive(D, 0.01),
        "rows_proj": int8(D, D),
        "rows_proj_scale": positive(D, 0.01),
    }


CALLS: list[tuple[str, list[str], list[str], dict[str, float]]] = [
    ("AddRMSNormQuantize", ["x", "added", "norm", "norm_scale"], ["normed", "sum"], {"eps": 1e-5}),
    ("LinearInt8Quantize", ["normed", "in_scale", "in_proj", "in_proj_scale", "hidden_scale"],
     ["hidden"], {}),
    ("Dequantize", ["hidden", "hidden_scale"], ["floating"], {}),
    ("HadamardQuantize", ["floating", "slow", "fast", "turned_scale"], ["turned"], {}),
    ("LinearInt8", ["turned", "turned_one", "out_proj", "out_proj_scale"], ["out"], {}),
    ("QuantizeRows", ["out"], ["out_q", "out_scale"], {}),
    ("LinearInt8Rows", ["out_q", "out_scale", "rows_proj", "rows_proj_scale"], ["y"], {}),
]  # fmt: skip


def chain(weights: dict[str, Array]) -> bytes:
    nodes, functions = [], {}
    for op, inputs, outputs, attributes in CALLS:
        name = OPS[op].function(attributes)
        nodes.append(helper.make_node(name, inputs, outputs, domain=DOMAIN, **attributes))
        functions[name] = function(name, "ort")
    rows = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["T", "B", D]) for n in
            ("x", "added")]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "chain",
        rows,
        [onnx.ValueInfoProto(name=n) for n in OUTPUTS],
        [numpy_helper.from_array(a, n) for n, a in weights.items()],
    )
    imports = [helper.make_opsetid(d, v) for d, v in (OPSETS | {DOMAIN: VERSION}).items()]
    return helper.make_model(
        graph, functions=list(functions.values()), opset_imports=imports, ir_version=10
    ).SerializeToString()


def expected(weights: dict[str, Array], x: Array, added: Array) -> dict[str, Array]:
    w = {n: torch.from_numpy(a.copy()) for n, a in weights.items()}
    total = torch.from_numpy(x + added)
    normed = norm.rms_norm_quantize(total, w["norm"], w["norm_scale"], 1e-5)
    hidden = linear.linear_int8_quantize(
        normed, w["in_scale"], w["in_proj"], w["in_proj_scale"], w["hidden_scale"]
    )
    floating = quantize.dequantize(hidden, w["hidden_scale"])
    turned = quantize.quantize(hadamard.hadamard(floating, w["slow"], w["fast"]), w["turned_scale"])
    out = linear.linear_int8(turned, w["turned_one"], w["out_proj"], w["out_proj_scale"])
    y = linear.linear_int8(*quantize.quantize_rows(out), w["rows_proj"], w["rows_proj_scale"])
    return {"y": y.numpy(), "sum": x + added, "hidden": hidden.numpy()}


def session(model: bytes, precise: bool, saved: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.optimized_model_filepath = str(saved)
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if precise:
        options.add_session_config_entry("session.x64quantprecision", "1")
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def inputs() -> dict[str, Array]:
    rng = np.random.default_rng(6)
    return {n: rng.standard_normal((65, 3, D)).astype(np.float32) for n in ("x", "added")}


def apart(found: dict[str, Array], wanted: dict[str, Array]) -> float:
    """Return the mean difference of the rounded values in the middle of the chain, in steps."""
    assert np.array_equal(found["sum"], wanted["sum"])
    error = np.abs(found["y"] - wanted["y"]) / np.abs(wanted["y"]).max()
    steps = float(np.abs(found["hidden"].astype(int) - wanted["hidden"]).mean())
    return max(steps, float(np.median(error)))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("precise", [False, True])
def test_a_chain_is_integer_products_and_nothing_more(
    per_row: bool, precise: bool, tmp_path: Path
) -> None:
    weights = constants(np.random.default_rng(5), per_row)
    model = session(chain(weights), precise, tmp_path / "optimized.onnx")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    # ONNX Runtime decides which processors need other weights for exact products
    only_integer_products(optimized, TensorProto.INT8, *[TensorProto.UINT8] * precise)
    only_these_run(optimized)
    if precise or cpu.has_vnni():  # else products saturate: tests/test_cpu_without_vnni.py
        found = dict(zip(OUTPUTS, model.run(None, inputs()), strict=True))
        assert apart(found, expected(weights, **inputs())) <= 1e-3


def only_integer_products(optimized: onnx.ModelProto, *weights: int) -> None:
    """Fail for a product of int8 values in floating point, or with signed activations."""
    nodes = list(optimized.graph.node)
    constant = {i.name: i for i in optimized.graph.initializer}
    maker = {o: n for n in nodes for o in n.output}
    products = [n for n in nodes if n.op_type in PRODUCTS]
    assert len(products) == sum(call[0].startswith("LinearInt8") for call in CALLS)
    for node in products:
        quantize = maker[node.input[0]]
        assert quantize.op_type == "QuantizeLinear"
        zero = numpy_helper.to_array(constant[quantize.input[2]])
        assert zero.dtype == np.uint8 and (zero == 128).all()
        # transposed on loading, otherwise it would not be a constant
        assert constant[node.input[1]].data_type in weights
    floating = [n for n in nodes if "MatMul" in n.op_type and n.op_type not in PRODUCTS]
    for node in floating:  # only the rotation
        assert {"slow", "fast"} & set(node.input), node.op_type


def only_these_run(optimized: onnx.ModelProto) -> None:
    """Fail if a transpose, a constant's dequantization or a choice by a constant remains."""
    run = [n.op_type for n in optimized.graph.node]
    assert not {"Transpose", "DequantizeLinear", "If", "Constant", "Size", "Concat"} & set(run)
    constant = {i.name for i in optimized.graph.initializer}
    for node in optimized.graph.node:
        assert not set(filter(None, node.input)) <= constant, f"{node.op_type} has only constants"
